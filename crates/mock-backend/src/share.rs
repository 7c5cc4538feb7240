//! Memory shared with other processes: `alloc_core`'s sharing traits for [`MockBackend`].
//!
//! Each backend is a process. Those on one [`Exchange`] are on one machine, and the judges know what
//! each has of the others: memory that one borrows, another may neither hand out nor give back.
//! Tokens also reach real processes, where nobody judges, and carry a file there for bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;

use alloc_core::backend::{
    DeviceKey, ErrorKind, Refused, Segment, Share, SharePages, Token, TokenKind,
};
use alloc_core::{Addr, DeviceId};
use parking_lot::Mutex;

use crate::event::MockEvent;
use crate::memory::{MockPage, MockSegment, Piece};
use crate::sim::{Failure, Sim, on_range, on_stream};
use crate::{Call, CallInfo, Judge, MockBackend, MockError, MockStream, Rule, SpanKind};

/// Makes the bytes of exported memory.
pub(crate) type Payloads = Box<dyn Fn(u64) -> File + Send + Sync>;

const SEGMENT: TokenKind = TokenKind(1);
const PAGE: TokenKind = TokenKind(2);
const EVENT: TokenKind = TokenKind(3);

const UNKNOWN_KIND: Failure = (ErrorKind::Unsupported, "an unknown kind of token");
const GARBLED: Failure = (ErrorKind::Other, "the token is garbled");
const GONE: Failure = (ErrorKind::Other, "there is no such memory or event any more");

/// How a backend is connected to others.
pub(crate) struct Neighbours {
    pub(crate) exchange: Exchange,
    pub(crate) payloads: Option<Payloads>,
}

/// What the processes of one simulated machine know of each other. Clones are the same.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// Tells machines apart, also those in other processes of the real one.
    machine: u64,
    book: Arc<Mutex<Book>>,
}

#[derive(Debug, Default)]
struct Book {
    next: u64,
    exports: BTreeMap<u64, Exported>,
    /// Events that their exporters still hold, and whether they were reached when exported.
    events: BTreeMap<u64, bool>,
    borrows: Vec<Borrow>,
}

/// A segment or page that was exported.
#[derive(Debug)]
struct Exported {
    owner: u32,
    kind: TokenKind,
    physical: Piece,
    device: u8,
    /// Backends that have it open.
    importers: Vec<u32>,
    payload: Option<Arc<File>>,
}

/// A range that another process has from an exporter, in the exporter's physical memory.
#[derive(Debug)]
struct Borrow {
    owner: u32,
    physical: Piece,
    borrower: u32,
    addr: Addr,
}

impl Exchange {
    /// A machine without processes.
    pub fn new() -> Self {
        let machine = RandomState::new().hash_one(0);
        Exchange { machine, book: Arc::default() }
    }

    /// How many pieces the processes have open of each other.
    pub fn imports(&self) -> usize {
        self.book.lock().exports.values().map(|export| export.importers.len()).sum()
    }

    /// How many ranges are borrowed.
    pub fn borrows(&self) -> usize {
        self.book.lock().borrows.len()
    }

    /// A process is gone, with all it had open and borrowed.
    pub(crate) fn forget(&self, process: u32) {
        let mut book = self.book.lock();
        book.borrows.retain(|borrow| borrow.borrower != process);
        for export in book.exports.values_mut() {
            export.importers.retain(|importer| *importer != process);
        }
    }
}

impl Default for Exchange {
    fn default() -> Self {
        Exchange::new()
    }
}

impl Book {
    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn borrower_of(&self, owner: u32, (from, to): Piece) -> Option<u32> {
        let overlaps = |borrow: &&Borrow| {
            borrow.owner == owner && borrow.physical.0 < to && from < borrow.physical.1
        };
        self.borrows.iter().find(overlaps).map(|borrow| borrow.borrower)
    }
}

/// What a backend has open of others.
#[derive(Debug, Default)]
pub(crate) struct Imports {
    /// By the first byte that it got in this backend's physical memory.
    open: BTreeMap<u64, Import>,
    borrowed: BTreeMap<Addr, Borrowed>,
    /// Streams that wait for an event.
    awaited: BTreeSet<(usize, u64)>,
}

#[derive(Debug)]
struct Import {
    bytes: u64,
    /// The export, if it is of this machine, with its owner and first byte there.
    export: Option<(u64, u32, u64)>,
    payload: Option<Arc<File>>,
}

/// What one block of another process is here, however often it was sent.
#[derive(Debug, Default)]
struct Borrowed {
    bytes: u64,
    /// Loans that are not returned, and those of them that the client still has.
    loans: u32,
    held: u32,
    /// Events that say when the producer is done: one of them must be waited for.
    ready: Vec<u64>,
}

impl Imports {
    /// Whether `addr` is borrowed and `stream` does not wait for its producer.
    pub(crate) fn is_unready(&self, addr: Addr, stream: usize) -> bool {
        let lower = self.borrowed.range(..=addr).next_back();
        let inside = lower.filter(|(start, borrowed)| addr - **start < borrowed.bytes);
        let waits = |event: &u64| self.awaited.contains(&(stream, *event));
        inside.is_some_and(|(_, own)| !own.ready.is_empty() && !own.ready.iter().any(waits))
    }

    fn of_physical(&self, at: u64) -> Option<(u64, &Import)> {
        let (start, import) = self.open.range(..=at).next_back()?;
        (at - start < import.bytes).then_some((at - start, import))
    }
}

/// A segment of another process. A dropped one shows up as a leaked segment.
#[derive(PartialEq, Eq, Debug)]
pub struct MockOpened(MockSegment);

impl Segment for MockOpened {
    fn base(&self) -> Addr {
        self.0.base
    }

    fn bytes(&self) -> u64 {
        self.0.bytes
    }
}

/// An event that other processes may wait for until it is dropped.
#[derive(Debug)]
pub struct MockSharedEvent {
    exchange: Exchange,
    number: u64,
    _event: MockEvent,
}

impl Drop for MockSharedEvent {
    fn drop(&mut self) {
        self.exchange.book.lock().events.remove(&self.number);
    }
}

/// The numbers in a token: machine, number there, bytes.
fn encode(numbers: [u64; 3]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

fn decode(token: &Token<File>) -> Result<[u64; 3], Failure> {
    let mut numbers = [0; 3];
    if token.bytes.len() != 24 {
        return Err(GARBLED);
    }
    for (number, bytes) in numbers.iter_mut().zip(token.bytes.chunks_exact(8)) {
        *number = u64::from_le_bytes(bytes.try_into().map_err(|_| GARBLED)?);
    }
    Ok(numbers)
}

impl MockBackend {
    fn export(
        &self,
        sim: &mut Sim,
        kind: TokenKind,
        device: DeviceId,
        physical: Piece,
    ) -> Result<Token<File>, Failure> {
        let Neighbours { exchange, payloads } = &self.shared.neighbours;
        let (owner, bytes) = (self.shared.id, physical.1 - physical.0);
        let mut book = exchange.book.lock();
        let same = |export: &Exported| export.owner == owner && export.physical == physical;
        let known = book.exports.iter().find(|(_, export)| same(export)).map(|(key, _)| *key);
        let key = known.unwrap_or_else(|| {
            let key = book.number();
            let payload = payloads.as_ref().map(|make| Arc::new(make(bytes)));
            let device = sim.memory.devices[device.index()].key;
            let importers = Vec::new();
            book.exports
                .insert(key, Exported { owner, kind, physical, device, importers, payload });
            key
        });
        let payload = book.exports[&key].payload.as_ref();
        let descriptor = payload.map(|file| file.try_clone()).transpose();
        let descriptor = descriptor.map_err(|_| (ErrorKind::Other, "no descriptor is left"))?;
        Ok(Token { kind, bytes: encode([exchange.machine, key, bytes]), descriptor })
    }

    /// Finds what a token means and opens it for this process.
    fn open(
        &self,
        sim: &mut Sim,
        info: &CallInfo,
        kind: TokenKind,
        token: Token<File>,
    ) -> Result<Import, Failure> {
        if token.kind != kind {
            return Err(UNKNOWN_KIND);
        }
        let [machine, key, bytes] = decode(&token)?;
        if bytes != info.bytes {
            return Err(sim.refuse(Rule::BadRequest, info, "the memory has another size"));
        }
        let payload = token.descriptor.map(Arc::new);
        let exchange = &self.shared.neighbours.exchange;
        if machine != exchange.machine {
            return Ok(Import { bytes, export: None, payload });
        }
        let mut book = exchange.book.lock();
        let export = book.exports.get_mut(&key).filter(|e| e.kind == kind).ok_or(GONE)?;
        if export.device != sim.memory.devices[info.device.index()].key {
            return Err(sim.refuse(Rule::BadRequest, info, "the memory is on another device"));
        }
        if export.owner == self.shared.id && kind == SEGMENT {
            return Err((ErrorKind::Other, "the process that exported it cannot open it"));
        }
        if export.importers.contains(&self.shared.id) {
            return Err(sim.refuse(Rule::DoubleImport, info, "it is open here already"));
        }
        export.importers.push(self.shared.id);
        Ok(Import { bytes, export: Some((key, export.owner, export.physical.0)), payload })
    }

    /// Undoes [`open`](Self::open).
    fn close(&self, import: &Import) {
        let Some((key, ..)) = import.export else { return };
        let mut book = self.shared.neighbours.exchange.book.lock();
        if let Some(export) = book.exports.get_mut(&key) {
            export.importers.retain(|importer| *importer != self.shared.id);
        }
    }

    /// Closes what is open at this place of physical memory. `false` if it is the process's own.
    pub(crate) fn end_import(&self, sim: &mut Sim, physical: u64) -> bool {
        let import = sim.imports.open.remove(&physical);
        import.iter().for_each(|import| self.close(import));
        import.is_some()
    }

    /// Memory of this process goes away; judges that nobody has borrowed it.
    pub(crate) fn end_export(&self, sim: &mut Sim, piece: Piece) {
        let mut book = self.shared.neighbours.exchange.book.lock();
        let owner = self.shared.id;
        let borrower = book.borrower_of(owner, piece);
        book.exports.retain(|_, e| (e.owner, e.physical.0) != (owner, piece.0));
        drop(book);
        if borrower.is_some() {
            sim.violate(Rule::ReleaseOfShared, (None, None), (Addr::NULL, piece.1 - piece.0));
        }
    }

    /// Judges that what was handed out is borrowed by nobody.
    pub(crate) fn judge_reuse(&self, sim: &mut Sim, addr: Addr, bytes: u64) {
        let pieces = sim.memory.pieces(addr, bytes).unwrap_or_default();
        let book = self.shared.neighbours.exchange.book.lock();
        let lent = pieces.iter().any(|piece| book.borrower_of(self.shared.id, *piece).is_some());
        drop(book);
        if lent {
            sim.violate(Rule::SharedReuse, (None, None), (addr, bytes));
        }
    }

    /// The process is killed: everything that it had open is closed, without a call. It can do
    /// nothing any more, and nothing that it does is judged.
    pub fn kill(&self) {
        self.unload();
        self.shared.neighbours.exchange.forget(self.shared.id);
    }

    /// The file with the bytes of the exported or imported memory at `addr`, and where they are in it;
    /// `None` unless [`Builder::payloads`](crate::Builder::payloads) made one.
    pub fn payload(&self, addr: Addr) -> Option<(Arc<File>, u64)> {
        let sim = self.sim();
        let (at, _) = *sim.memory.pieces(addr, 1).ok()?.first()?;
        if let Some((offset, import)) = sim.imports.of_physical(at) {
            return Some((Arc::clone(import.payload.as_ref()?), offset));
        }
        let book = self.shared.neighbours.exchange.book.lock();
        let holds =
            |e: &&Exported| e.owner == self.shared.id && e.physical.0 <= at && at < e.physical.1;
        let export = book.exports.values().find(holds)?;
        Some((Arc::clone(export.payload.as_ref()?), at - export.physical.0))
    }
}

impl Judge<'_> {
    /// The client got a block of another process, to be used on `stream` from now on: an allocation,
    /// which that process must leave alone until it is [`returned`](Self::returned). Work on it must
    /// wait for `ready` first, if given. The same block may be lent several times at once.
    pub fn borrowed(
        &self,
        addr: Addr,
        bytes: u64,
        stream: &MockStream,
        ready: Option<&Token<File>>,
    ) {
        let backend = self.backend();
        let known = backend.sim().imports.borrowed.remove(&addr).unwrap_or_default();
        if known.held == 0 {
            self.allocated(addr, bytes, stream);
        }
        let mut sim = backend.sim();
        let mut book = backend.shared.neighbours.exchange.book.lock();
        let mut own =
            Borrowed { bytes, loans: known.loans + 1, held: known.held + 1, ready: known.ready };
        let event = ready.and_then(|token| decode(token).ok()).map(|[_, event, _]| event);
        match event.filter(|event| book.events.get(event) != Some(&true)) {
            Some(event) if known.loans == 0 || !own.ready.is_empty() => own.ready.push(event),
            // One who need not wait is enough.
            _ => own.ready.clear(),
        }
        if known.loans == 0 {
            book.borrows.extend(borrows(&sim, backend.shared.id, addr, bytes));
        }
        drop(book);
        sim.imports.borrowed.insert(addr, own);
    }

    /// The client has given up a loan of the block at `addr`.
    pub fn given_up(&self, addr: Addr) {
        let last = {
            let mut sim = self.backend().sim();
            let Some(own) = sim.imports.borrowed.get_mut(&addr) else { return };
            own.held -= 1;
            own.held == 0
        };
        if last {
            self.freed(addr);
        }
    }

    /// The producer is told that a loan of the block at `addr` has ended; the client has
    /// [given it up](Self::given_up) before. To be reported before the producer hears of it.
    pub fn returned(&self, addr: Addr) {
        let backend = self.backend();
        let mut sim = backend.sim();
        if sim.unloaded {
            return;
        }
        let Some(own) = sim.imports.borrowed.get_mut(&addr) else { return };
        own.loans -= 1;
        let bytes = own.bytes;
        if own.loans > 0 {
            return;
        }
        sim.imports.borrowed.remove(&addr);
        for stream in sim.streams.unseen_on(addr, bytes) {
            sim.violate(Rule::EarlyReturn, (Some(stream), None), (addr, bytes));
        }
        let mut book = backend.shared.neighbours.exchange.book.lock();
        book.borrows.retain(|borrow| (borrow.borrower, borrow.addr) != (backend.shared.id, addr));
    }
}

/// The ranges of others that a block lies in.
fn borrows(sim: &Sim, borrower: u32, addr: Addr, bytes: u64) -> Vec<Borrow> {
    let mut found = Vec::new();
    for (mut at, to) in sim.memory.pieces(addr, bytes).unwrap_or_default() {
        while at < to {
            let Some((offset, import)) = sim.imports.of_physical(at) else { break };
            let end = to.min(at - offset + import.bytes);
            if let Some((_, owner, first)) = import.export {
                let physical = (first + offset, first + offset + (end - at));
                found.push(Borrow { owner, physical, borrower, addr });
            }
            at = end;
        }
    }
    found
}

impl Share for MockBackend {
    type Descriptor = File;
    type Opened = MockOpened;
    type SharedEvent = MockSharedEvent;

    fn device_key(&self, device: DeviceId) -> Result<DeviceKey, MockError> {
        let info = on_range(Call::DeviceKey, device, Addr::NULL, 0);
        self.call(info, |sim, _| match sim.memory.devices.get(device.index()) {
            Some(device) => Ok(DeviceKey([device.key; 16])),
            None => Err(sim.refuse(Rule::BadRequest, &info, "no such device")),
        })
    }

    fn export_segment(&self, segment: &MockSegment) -> Result<Token<File>, MockError> {
        let &MockSegment { backend, device, base, bytes } = segment;
        let info = on_range(Call::ExportSegment, device, base, bytes);
        self.call(info, |sim, _| {
            self.check_owner(sim, backend, &info)?;
            let from = sim.memory.physical_of(base).ok_or(GONE)?;
            self.export(sim, SEGMENT, device, (from, from + bytes))
        })
    }

    fn open_segment(
        &self,
        device: DeviceId,
        bytes: u64,
        token: Token<File>,
    ) -> Result<MockOpened, MockError> {
        let info = on_range(Call::OpenSegment, device, Addr::NULL, bytes);
        let import = Mutex::new(None);
        let base = self.placed(
            info,
            SpanKind::Segment,
            |sim| {
                self.check_size(sim, 512, &info)?;
                *import.lock() = Some(self.open(sim, &info, SEGMENT, token)?);
                Ok(())
            },
            |sim, base| {
                sim.memory.add_segment(base, bytes);
                if let (Some(at), Some(import)) =
                    (sim.memory.physical_of(base), import.lock().take())
                {
                    sim.imports.open.insert(at, import);
                }
            },
            |_| import.lock().iter().for_each(|import| self.close(import)),
        )?;
        Ok(MockOpened(MockSegment { backend: self.shared.id, device, base, bytes }))
    }

    fn close_segment(&self, opened: MockOpened) -> Result<(), Refused<MockOpened, MockError>> {
        let MockSegment { backend, device, base, bytes } = opened.0;
        let info = on_range(Call::CloseSegment, device, base, bytes);
        self.consuming(info, opened, |sim, _| {
            self.check_owner(sim, backend, &info)?;
            sim.vanishes(Rule::UnmapUnderWork, base, bytes);
            if let Some(piece) = sim.memory.remove_segment(base) {
                sim.streams.forget_physical(piece);
                self.end_import(sim, piece.0);
            }
            sim.space.give_back(base);
            Ok(())
        })
    }

    fn export_event(
        &self,
        stream: &MockStream,
    ) -> Result<(MockSharedEvent, Token<File>), MockError> {
        let info = on_stream(Call::ExportEvent, stream);
        self.call(info, |sim, _| {
            self.check_stream(sim, stream, &info)?;
            let event = self.event_on(sim, stream.index);
            let reached = sim.streams.reached(event.stream, event.items);
            let exchange = self.shared.neighbours.exchange.clone();
            let mut book = exchange.book.lock();
            let number = book.number();
            book.events.insert(number, reached);
            drop(book);
            let bytes = encode([exchange.machine, number, 0]);
            let token = Token { kind: EVENT, bytes, descriptor: None };
            Ok((MockSharedEvent { exchange, number, _event: event }, token))
        })
    }

    fn await_event(&self, stream: &MockStream, token: &Token<File>) -> Result<(), MockError> {
        let info = on_stream(Call::AwaitEvent, stream);
        self.call(info, |sim, _| {
            self.check_stream(sim, stream, &info)?;
            if token.kind != EVENT {
                return Err(UNKNOWN_KIND);
            }
            let [machine, number, _] = decode(token)?;
            let exchange = &self.shared.neighbours.exchange;
            if machine == exchange.machine && !exchange.book.lock().events.contains_key(&number) {
                return Err(GONE);
            }
            sim.imports.awaited.insert((stream.index, number));
            Ok(())
        })
    }
}

impl SharePages for MockBackend {
    fn export_page(&self, page: &MockPage) -> Result<Token<File>, MockError> {
        let &MockPage { backend, device, physical, bytes } = page;
        let info = on_range(Call::ExportPage, device, Addr::NULL, bytes);
        self.call(info, |sim, _| {
            self.check_owner(sim, backend, &info)?;
            self.export(sim, PAGE, device, (physical, physical + bytes))
        })
    }

    fn import_page(
        &self,
        device: DeviceId,
        bytes: u64,
        token: Token<File>,
    ) -> Result<MockPage, MockError> {
        let info = on_range(Call::ImportPage, device, Addr::NULL, bytes);
        self.call(info, |sim, _| {
            self.check_size(sim, self.shared.granularity, &info)?;
            let import = self.open(sim, &info, PAGE, token)?;
            let physical = sim.memory.add_page(bytes);
            sim.imports.open.insert(physical, import);
            Ok(MockPage { backend: self.shared.id, device, physical, bytes })
        })
    }
}
