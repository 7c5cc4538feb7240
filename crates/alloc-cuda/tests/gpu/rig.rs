//! What the tests run on: a backend, kernels that write and check patterns, gates that hold streams.

use alloc_core::backend::{Backend, MemoryInfo, Stream as _};
use alloc_core::{Addr, Config, DeviceId};
use alloc_cuda::{CudaAllocator, CudaBackend, CudaError, CudaStream};
use cuda_driver::fake::{FakeKernel, KernelMemory, Outcome, Session, TestBody};
use cuda_driver::{
    Argument, Attribute, Context, DeviceMemory, Driver, Event, Kernel, Module, Shape, code,
};
use std::ffi::CStr;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

pub(crate) const KIB: u64 = 1 << 10;
pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const FIRST: DeviceId = DeviceId::new(0);

/// Word `i` of a pattern is `(i + seed) * FACTOR`, in 32 bits.
const FACTOR: u32 = 2_654_435_761;

/// Two kernels: `fill` writes a pattern, `check` counts the words that differ from it. Written for
/// compute capability 7.0 and compiled by the driver for whatever is there.
const PTX: &CStr = c"
.version 7.0
.target sm_70
.address_size 64

.visible .entry fill(
    .param .u64 param_to, .param .u64 param_words, .param .u32 param_seed)
{
    .reg .pred %p<2>;
    .reg .b32 %r<10>;
    .reg .b64 %rd<10>;
    ld.param.u64 %rd1, [param_to];
    ld.param.u64 %rd2, [param_words];
    ld.param.u32 %r1, [param_seed];
    cvta.to.global.u64 %rd3, %rd1;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    cvt.u64.u32 %rd4, %r5;
    mov.u32 %r6, %nctaid.x;
    mul.lo.s32 %r7, %r6, %r3;
    cvt.u64.u32 %rd5, %r7;
FILL_NEXT:
    setp.ge.u64 %p1, %rd4, %rd2;
    @%p1 bra FILL_END;
    cvt.u32.u64 %r8, %rd4;
    add.s32 %r8, %r8, %r1;
    mul.lo.s32 %r8, %r8, -1640531535;
    shl.b64 %rd6, %rd4, 2;
    add.s64 %rd6, %rd3, %rd6;
    st.global.u32 [%rd6], %r8;
    add.s64 %rd4, %rd4, %rd5;
    bra FILL_NEXT;
FILL_END:
    ret;
}

.visible .entry check(
    .param .u64 param_from, .param .u64 param_words, .param .u32 param_seed, .param .u64 param_wrong)
{
    .reg .pred %p<3>;
    .reg .b32 %r<12>;
    .reg .b64 %rd<10>;
    ld.param.u64 %rd1, [param_from];
    ld.param.u64 %rd2, [param_words];
    ld.param.u32 %r1, [param_seed];
    ld.param.u64 %rd7, [param_wrong];
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd8, %rd7;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.s32 %r5, %r2, %r3, %r4;
    cvt.u64.u32 %rd4, %r5;
    mov.u32 %r6, %nctaid.x;
    mul.lo.s32 %r7, %r6, %r3;
    cvt.u64.u32 %rd5, %r7;
CHECK_NEXT:
    setp.ge.u64 %p1, %rd4, %rd2;
    @%p1 bra CHECK_END;
    cvt.u32.u64 %r8, %rd4;
    add.s32 %r8, %r8, %r1;
    mul.lo.s32 %r8, %r8, -1640531535;
    shl.b64 %rd6, %rd4, 2;
    add.s64 %rd6, %rd3, %rd6;
    ld.global.u32 %r9, [%rd6];
    setp.eq.s32 %p2, %r9, %r8;
    @%p2 bra CHECK_SAME;
    atom.global.add.u32 %r10, [%rd8], 1;
CHECK_SAME:
    add.s64 %rd4, %rd4, %rd5;
    bra CHECK_NEXT;
CHECK_END:
    ret;
}
";

/// One device with its kernels.
struct Bench {
    context: Arc<Context>,
    fill: Kernel,
    check: Kernel,
    /// One 32-bit counter of wrong words.
    wrong: Option<DeviceMemory>,
}

impl Bench {
    fn new(context: Arc<Context>) -> Result<Bench, CudaError> {
        let module = Module::load_ptx(&context, PTX)?;
        let (fill, check) = (module.kernel(c"fill")?, module.kernel(c"check")?);
        let wrong = DeviceMemory::allocate(&context, 4)?;
        Ok(Bench { context, fill, check, wrong: Some(wrong) })
    }

    fn counter(&self) -> u64 {
        self.wrong.as_ref().expect("there until dropped").addr()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        let _ = self.wrong.take().map(DeviceMemory::free);
    }
}

/// What a test gets.
pub(crate) struct Rig {
    pub(crate) backend: CudaBackend,
    /// Whether there is a GPU behind it.
    pub(crate) is_real: bool,
    benches: Vec<Bench>,
}

impl Rig {
    /// All GPUs of the machine.
    pub(crate) fn on_gpu() -> Result<Rig, CudaError> {
        Rig::new(Driver::load()?, true)
    }

    fn new(driver: &'static Driver, is_real: bool) -> Result<Rig, CudaError> {
        let backend = CudaBackend::with_driver(driver)?;
        // Two are enough for every test, and making a context takes a while.
        let devices = (0..backend.device_count().min(2)).map(DeviceId::new);
        let bench = |device| Bench::new(backend.context(device)?);
        let benches = devices.map(bench).collect::<Result<Vec<_>, _>>()?;
        let rig = Rig { backend, is_real, benches };
        for index in 0..rig.devices() {
            rig.warm_up(DeviceId::new(index as u16))?;
        }
        Ok(rig)
    }

    /// Runs each kernel once: its code may be loaded on the first run, which would wait for a held
    /// stream.
    fn warm_up(&self, device: DeviceId) -> Result<(), CudaError> {
        let stream = self.backend.create_stream(device)?;
        let counter = self.bench(device).counter();
        self.fill(&stream, Addr::new(counter), 4, 0);
        self.check(&stream, Addr::new(counter), 4, 0);
        stream.synchronize()?;
        self.bench(device).context.synchronize()?;
        Ok(())
    }

    /// Runs one test, then checks that it left no memory behind. (Some may stay with the driver.)
    pub(crate) fn run(&self, test: TestBody<Rig>) -> Outcome {
        const SLACK: u64 = 256 * MIB;
        let before = self.free_bytes(FIRST);
        let outcome = test(self);
        self.bench(FIRST).context.synchronize().expect("no failed work");
        let after = self.free_bytes(FIRST);
        assert!(after + SLACK >= before, "left behind: {} MiB", (before - after) / MIB);
        outcome
    }

    pub(crate) fn describe(&self) -> String {
        let device = self.bench(FIRST).context.device();
        let version = self.backend.driver().version();
        let is = |attribute| device.supports(attribute).unwrap_or(false);
        format!(
            "{} device(s), first: {}, {} MiB, {} multiprocessors, CUDA {version}, virtual memory: {}, \
             exportable: {}, GPUDirect: {}",
            self.backend.device_count(),
            device.name().unwrap_or_default(),
            device.total_memory().unwrap_or(0) / MIB,
            device.attribute(Attribute::MultiprocessorCount).unwrap_or(0),
            is(Attribute::VirtualMemory),
            is(Attribute::PosixFileDescriptor),
            is(Attribute::GpuDirectWithVirtualMemory),
        )
    }

    fn bench(&self, device: DeviceId) -> &Bench {
        &self.benches[device.index()]
    }

    /// How many devices the tests may use.
    pub(crate) fn devices(&self) -> usize {
        self.benches.len()
    }

    pub(crate) fn context(&self, device: DeviceId) -> &Arc<Context> {
        &self.bench(device).context
    }

    pub(crate) fn free_bytes(&self, device: DeviceId) -> u64 {
        self.backend.memory(device).expect("memory figures").free
    }

    /// A new stream on the first device.
    pub(crate) fn stream(&self) -> CudaStream {
        self.backend.create_stream(FIRST).expect("stream")
    }

    /// An allocator on the rig's backend.
    pub(crate) fn allocator(&self, config: Config) -> CudaAllocator {
        CudaAllocator::on(self.backend.clone(), config).expect("allocator")
    }

    /// Queues writing a pattern to `bytes` from `addr` on, both multiples of 4.
    pub(crate) fn fill(&self, stream: &CudaStream, addr: Addr, bytes: u64, seed: u32) {
        let kernel = &self.bench(stream.device()).fill;
        for (arguments, shape) in self.spans(addr, bytes, seed) {
            // SAFETY: three parameters of these sizes; the memory is a test's own device memory.
            unsafe { kernel.launch(stream.driver_stream(), shape, &arguments) }.expect("launch");
        }
    }

    /// Queues a little work on memory of the rig's own, which `wrong_words` must not be asked for
    /// after it has run.
    pub(crate) fn touch(&self, stream: &CudaStream) {
        self.fill(stream, Addr::new(self.bench(stream.device()).counter()), 4, 0);
    }

    /// What is queued on `after` from now on comes after all that is queued on `before`; in a capture
    /// this forks and joins.
    pub(crate) fn order(&self, before: &CudaStream, after: &CudaStream) {
        let event = Event::create(self.context(before.device())).expect("event");
        event.record(before.driver_stream()).expect("records");
        after.driver_stream().wait_event(&event).expect("waits");
    }

    /// Queues counting the words that differ from a pattern.
    pub(crate) fn check(&self, stream: &CudaStream, addr: Addr, bytes: u64, seed: u32) {
        let bench = self.bench(stream.device());
        for ([first, second, third], shape) in self.spans(addr, bytes, seed) {
            let arguments = [first, second, third, Argument::Long(bench.counter())];
            // SAFETY: four parameters of these sizes; the counter is the rig's own device memory.
            unsafe { bench.check.launch(stream.driver_stream(), shape, &arguments) }
                .expect("launch");
        }
    }

    /// What is filled and checked of a range: all of it, on a GPU. The imitation is slow, and its
    /// memory has no holes: there it is the beginning and the end.
    fn spans(&self, addr: Addr, bytes: u64, seed: u32) -> Vec<([Argument; 3], Shape)> {
        let span = |from: u64, bytes: u64| {
            let seed = seed.wrapping_add((from / 4) as u32);
            let arguments = [
                Argument::Long(addr.get() + from),
                Argument::Long(bytes / 4),
                Argument::Word(seed),
            ];
            let blocks = (bytes / KIB + 1).min(528) as u32;
            (arguments, Shape { blocks, threads: 256 })
        };
        if self.is_real || bytes <= 2 * KIB {
            vec![span(0, bytes)]
        } else {
            vec![span(0, KIB), span(bytes - KIB, KIB)]
        }
    }

    /// How many words [`check`](Self::check) looks at in so many bytes.
    pub(crate) fn words_checked(&self, bytes: u64) -> u32 {
        let all = if self.is_real { bytes } else { bytes.min(2 * KIB) };
        (all / 4) as u32
    }

    /// Waits for a device and returns the number of wrong words found since last asked.
    pub(crate) fn wrong_words(&self, device: DeviceId) -> u32 {
        let bench = self.bench(device);
        bench.context.synchronize().expect("no failed work");
        let mut count = [0; 4];
        bench.context.copy_to_host(&mut count, bench.counter()).expect("copy");
        // SAFETY: the rig's own device memory; nothing is running.
        unsafe { bench.context.copy_to_device(bench.counter(), &[0; 4]) }.expect("copy");
        u32::from_le_bytes(count)
    }
}

/// Holds the work queued behind it on a stream until it is opened or dropped; for ten seconds at
/// most, so that a mistake is a failed test and no hang.
pub(crate) struct Gate {
    open: mpsc::Sender<()>,
}

impl Gate {
    pub(crate) fn close(stream: &CudaStream) -> Gate {
        let (open, opened) = mpsc::channel::<()>();
        let hold = move || {
            let _ = opened.recv_timeout(Duration::from_secs(10));
        };
        stream.driver_stream().call_host(hold).expect("queued");
        Gate { open }
    }

    pub(crate) fn open(self) {
        drop(self.open);
    }
}

/// Runs one test on a fresh imitation of two small devices. Nothing at all may be left behind.
pub(crate) fn on_imitation(test: TestBody<Rig>) -> Outcome {
    let session = Session::new(&[4096 * MIB, 4096 * MIB]);
    session.define_kernel("fill", FakeKernel { parameters: 3, run: fill });
    session.define_kernel("check", FakeKernel { parameters: 4, run: check });
    let rig = Rig::new(session.driver(), false).expect("rig");
    let outcome = test(&rig);
    drop(rig);
    assert_eq!(session.outstanding(), 0, "everything is given back");
    assert_eq!(session.current_device(), None, "the current context is as before");
    outcome
}

fn word(index: u64, seed: u32) -> [u8; 4] {
    (index as u32).wrapping_add(seed).wrapping_mul(FACTOR).to_le_bytes()
}

fn fill(memory: &mut KernelMemory<'_>, arguments: &[u64]) -> Result<(), u32> {
    let (addr, words, seed) = (arguments[0], arguments[1], arguments[2] as u32);
    let write = |offset: usize, piece: &mut [u8]| {
        for (index, bytes) in piece.chunks_exact_mut(4).enumerate() {
            bytes.copy_from_slice(&word((offset / 4 + index) as u64, seed));
        }
    };
    memory.visit(addr, 4 * words, write).map_err(|_| code::ILLEGAL_ADDRESS)
}

fn check(memory: &mut KernelMemory<'_>, arguments: &[u64]) -> Result<(), u32> {
    let (addr, words, seed) = (arguments[0], arguments[1], arguments[2] as u32);
    let mut wrong = 0u32;
    let compare = |offset: usize, piece: &mut [u8]| {
        for (index, bytes) in piece.chunks_exact(4).enumerate() {
            wrong += u32::from(*bytes != word((offset / 4 + index) as u64, seed));
        }
    };
    memory.visit(addr, 4 * words, compare).map_err(|_| code::ILLEGAL_ADDRESS)?;
    let add = |_, piece: &mut [u8]| {
        let mut count = [0; 4];
        count.copy_from_slice(piece);
        piece.copy_from_slice(&(u32::from_le_bytes(count).wrapping_add(wrong)).to_le_bytes());
    };
    memory.visit(arguments[3], 4, add).map_err(|_| code::ILLEGAL_ADDRESS)
}
