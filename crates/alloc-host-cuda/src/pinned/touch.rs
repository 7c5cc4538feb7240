//! First touch by several threads: the system makes pages one by one, as they are first written.

use super::map::page_bytes;
use parking_lot::{Condvar, Mutex};
use std::convert::Infallible;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// When the pages of memory are made that is going to be registered.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Touch {
    /// Before the driver is asked to register them. Fastest where a segment is registered as one piece.
    First,
    /// By other threads while the driver registers them: both begin at the first page, and the driver
    /// makes a page itself if it comes to it first. Faster where there are many pieces: the driver
    /// first looks for all pages of a piece, then maps them.
    Meanwhile,
}

/// What one thread touches at a time.
const CHUNK_BYTES: usize = 4 << 20;

/// Threads at most: more than any machine needs, and few enough to start.
const WORKERS_MAX: usize = 128;

/// Threads that touch memory. They start when first needed and live as long as the pool.
#[derive(Debug, Default)]
pub(crate) struct TouchPool {
    /// The processors that the threads run on; empty: any.
    processors: Vec<u32>,
    crew: Mutex<Crew>,
}

#[derive(Debug, Default)]
struct Crew {
    idle: Vec<Worker>,
    /// Those at work, too.
    started: usize,
}

#[derive(Debug)]
struct Worker {
    /// `None` only while being dropped.
    jobs: Option<Sender<Arc<Pages>>>,
    thread: Option<JoinHandle<()>>,
}

/// Whole pages of mapped memory that several threads touch, in chunks, in the order of addresses.
#[derive(Debug)]
struct Pages {
    start: usize,
    bytes: usize,
    /// Bytes that some thread has taken on; may go beyond `bytes`.
    taken: AtomicUsize,
    progress: Mutex<Progress>,
    idle: Condvar,
}

#[derive(Debug)]
struct Progress {
    /// Threads that have not finished.
    busy: usize,
    /// When the last one had.
    done: Instant,
}

impl TouchPool {
    /// A pool whose threads run on these processors, or on any if none is named.
    pub(crate) fn new(processors: Vec<u32>) -> Self {
        TouchPool { processors, crew: Mutex::default() }
    }

    /// Makes all pages of a range exist, with `threads` threads, and does `work` after that or
    /// meanwhile. If meanwhile, pages that do not exist when `work` is done are left as they are. The
    /// range is whole pages. Returns what `work` returned, and how long touching took.
    ///
    /// # Safety
    /// The range must be mapped, and nobody may rely on what is in it until the call returns.
    pub(super) unsafe fn touch<R>(
        &self,
        (start, bytes): (usize, usize),
        threads: usize,
        touch: Touch,
        work: impl FnOnce() -> R,
    ) -> (R, Duration) {
        let begin = Instant::now();
        let pages = Arc::new(Pages::new(start, bytes));
        let useful = threads.clamp(1, bytes.div_ceil(CHUNK_BYTES).max(1));
        // A single thread may as well be this one.
        let first = touch == Touch::First || useful == 1;
        let team = Team::new(self, &pages, if first { useful - 1 } else { useful });
        let touched = first.then(|| {
            pages.touch_chunks();
            pages.wait();
            begin.elapsed()
        });
        let result = work();
        drop(team);
        let meanwhile = || pages.progress.lock().done.saturating_duration_since(begin);
        (result, touched.unwrap_or_else(meanwhile))
    }

    /// So many threads, or fewer if the system refuses some. All of them have started up: a thread maps
    /// memory when it does, and whoever maps waits for those that make pages, and they for him.
    fn call(&self, count: usize) -> Vec<Worker> {
        let mut crew = self.crew.lock();
        let (starting, started) = channel();
        while crew.idle.len() < count && crew.started < WORKERS_MAX {
            let worker = Worker::start(self.processors.clone(), starting.clone());
            let Some(worker) = worker else { break };
            crew.idle.push(worker);
            crew.started += 1;
        }
        let rest = crew.idle.len().saturating_sub(count);
        let workers = crew.idle.split_off(rest);
        drop((crew, starting));
        // Ends when every new thread has dropped its end.
        started.iter().for_each(drop);
        workers
    }
}

/// Threads that touch pages. However it ends, nobody touches them afterwards.
struct Team<'a> {
    pool: &'a TouchPool,
    pages: &'a Pages,
    workers: Vec<Worker>,
}

impl<'a> Team<'a> {
    fn new(pool: &'a TouchPool, pages: &'a Arc<Pages>, count: usize) -> Self {
        let workers = pool.call(count);
        for worker in &workers {
            pages.progress.lock().busy += 1;
            let jobs = worker.jobs.as_ref();
            if jobs.is_none_or(|jobs| jobs.send(pages.clone()).is_err()) {
                pages.finish();
            }
        }
        Team { pool, pages, workers }
    }
}

impl Drop for Team<'_> {
    fn drop(&mut self) {
        self.pages.stop();
        self.pages.wait();
        self.pool.crew.lock().idle.append(&mut self.workers);
    }
}

impl Worker {
    /// Starts a thread, which drops `starting` when it is ready to work.
    fn start(processors: Vec<u32>, starting: Sender<Infallible>) -> Option<Worker> {
        let (jobs, queue) = channel();
        let builder = std::thread::Builder::new().name("pin-touch".to_owned());
        let work = move || {
            stay_on(&processors);
            // Has the process's allocator set up what it keeps for each thread.
            drop(black_box(Box::new(0_u8)));
            drop(starting);
            touch_all(&queue);
        };
        let thread = builder.spawn(work).ok()?;
        Some(Worker { jobs: Some(jobs), thread: Some(thread) })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // Its jobs cannot panic.
            let _ = thread.join();
        }
    }
}

fn touch_all(queue: &Receiver<Arc<Pages>>) {
    for pages in queue {
        pages.touch_chunks();
        pages.finish();
    }
}

impl Pages {
    fn new(start: usize, bytes: usize) -> Self {
        let progress = Mutex::new(Progress { busy: 0, done: Instant::now() });
        Pages { start, bytes, taken: AtomicUsize::new(0), progress, idle: Condvar::new() }
    }

    /// Touches chunks until none is left.
    fn touch_chunks(&self) {
        while let Some((offset, bytes)) = self.take() {
            touch_chunk(self.start + offset, bytes);
        }
    }

    /// The next chunk: offset and length.
    fn take(&self) -> Option<(usize, usize)> {
        let offset = self.taken.fetch_add(CHUNK_BYTES, Relaxed);
        let rest = self.bytes.checked_sub(offset).filter(|&rest| rest > 0)?;
        Some((offset, rest.min(CHUNK_BYTES)))
    }

    /// Leaves chunks that nobody has taken as they are.
    fn stop(&self) {
        self.taken.fetch_max(self.bytes, Relaxed);
    }

    /// One thread has finished.
    fn finish(&self) {
        let mut progress = self.progress.lock();
        progress.busy -= 1;
        progress.done = Instant::now();
        if progress.busy == 0 {
            self.idle.notify_all();
        }
    }

    /// Waits until all threads have finished.
    fn wait(&self) {
        let mut progress = self.progress.lock();
        while progress.busy > 0 {
            self.idle.wait(&mut progress);
        }
    }
}

/// Makes the pages of a chunk exist: in one call where the system has it, else by writing to each.
fn touch_chunk(start: usize, bytes: usize) {
    let place = std::ptr::with_exposed_provenance_mut::<u8>(start);
    // SAFETY: concerns a mapped range that is ours alone.
    let result = unsafe { libc::madvise(place.cast(), bytes, libc::MADV_POPULATE_WRITE) };
    if result == 0 {
        return;
    }
    for offset in (0..bytes).step_by(page_bytes()) {
        // SAFETY: stays inside the chunk.
        let page = unsafe { place.add(offset) };
        // SAFETY: mapped memory that nobody else uses; new pages are zero anyway.
        unsafe { page.write_volatile(0) };
    }
}

/// Keeps the calling thread on these processors, if it may run there.
fn stay_on(processors: &[u32]) {
    const PROCESSORS_MAX: usize = 1024;
    let mut mask = [0_u64; PROCESSORS_MAX / 64];
    for &processor in processors {
        if let Some(word) = mask.get_mut(processor as usize / 64) {
            *word |= 1 << (processor % 64);
        }
    }
    if mask.iter().any(|word| *word != 0) {
        // SAFETY: the mask is as long as stated; without success the thread runs anywhere, as before.
        unsafe { libc::sched_setaffinity(0, size_of_val(&mask), mask.as_ptr().cast()) };
    }
}

#[cfg(test)]
mod tests {
    use super::super::map::Mapping;
    use super::*;

    #[test]
    fn chunks_cover_the_range_exactly_and_in_order() {
        for bytes in [4096, CHUNK_BYTES, CHUNK_BYTES + 4096, 7 * CHUNK_BYTES - 4096] {
            let pages = Pages::new(1 << 20, bytes);
            let mut at = 0;
            while let Some((offset, length)) = pages.take() {
                assert_eq!(offset, at);
                assert!(length > 0 && length.is_multiple_of(4096));
                at += length;
            }
            assert_eq!(at, bytes);
            assert_eq!(pages.take(), None);
        }
    }

    fn resident_pages(mapping: &Mapping, bytes: usize) -> usize {
        let mut resident = vec![0_u8; bytes / page_bytes()];
        let place = std::ptr::with_exposed_provenance_mut(mapping.start());
        // SAFETY: only asks; the vector has room for one byte a page.
        assert_eq!(unsafe { libc::mincore(place, bytes, resident.as_mut_ptr()) }, 0);
        resident.iter().filter(|page| **page & 1 == 1).count()
    }

    #[test]
    fn every_page_exists_before_the_work_begins() {
        let pool = TouchPool::default();
        for threads in [1, 3, 8] {
            let pages = 3 * CHUNK_BYTES / page_bytes() + 5;
            let bytes = pages * page_bytes();
            let mapping = Mapping::new::<()>(bytes, None, false).expect("memory");
            assert_eq!(resident_pages(&mapping, bytes), 0);
            let range = (mapping.start(), bytes);
            let count = || resident_pages(&mapping, bytes);
            // SAFETY: whole pages of a mapping that only this test uses.
            let (resident, _) = unsafe { pool.touch(range, threads, Touch::First, count) };
            assert_eq!(resident, pages);
        }
        assert_eq!(pool.crew.lock().started, 3, "four chunks, one by this thread each time");
    }

    /// What the work waits for here only other threads do.
    #[test]
    fn pages_come_to_exist_while_the_work_goes_on() {
        let pool = TouchPool::new(vec![0]);
        let bytes = 5 * CHUNK_BYTES;
        let mapping = Mapping::new::<()>(bytes, None, false).expect("memory");
        let work = || {
            while resident_pages(&mapping, bytes) < bytes / page_bytes() {
                std::thread::yield_now();
            }
            42
        };
        // SAFETY: whole pages of a mapping that only this test uses.
        let (result, took) =
            unsafe { pool.touch((mapping.start(), bytes), 4, Touch::Meanwhile, work) };
        assert_eq!(result, 42);
        assert!(took > Duration::ZERO);
    }

    /// Work that ends early, as a failed registration does, may unmap the range.
    #[test]
    fn nobody_touches_the_range_after_the_call() {
        let pool = TouchPool::default();
        let bytes = 32 * CHUNK_BYTES;
        let mapping = Mapping::new::<()>(bytes, None, false).expect("memory");
        // SAFETY: whole pages of a mapping that only this test uses.
        unsafe { pool.touch((mapping.start(), bytes), 2, Touch::Meanwhile, || ()) };
        let resident = resident_pages(&mapping, bytes);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(resident_pages(&mapping, bytes), resident);
        assert_eq!(pool.crew.lock().idle.len(), 2, "the threads are free");
    }

    #[test]
    fn several_threads_may_touch_at_once() {
        let pool = TouchPool::default();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let bytes = 2 * CHUNK_BYTES;
                    let mapping = Mapping::new::<()>(bytes, None, false).expect("memory");
                    let count = || resident_pages(&mapping, bytes);
                    let range = (mapping.start(), bytes);
                    // SAFETY: whole pages of a mapping that only this thread uses.
                    let (resident, _) = unsafe { pool.touch(range, 4, Touch::First, count) };
                    assert_eq!(resident, bytes / page_bytes());
                });
            }
        });
    }
}
