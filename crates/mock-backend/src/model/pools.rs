//! Private pools: scopes, references, pins, and getting back to a checkpoint.

use alloc_core::{Addr, DeviceId, PoolId, StreamId};

use super::Model;
use super::device::{Block, DeviceModel, Request, change};
use super::driver::Driver;

/// A private pool of one device.
#[derive(Clone, Debug)]
pub(super) struct PoolModel {
    pub(super) id: PoolId,
    pub(super) references: usize,
    pins: usize,
    pub(super) no_split: bool,
    use_on_oom: bool,
}

/// A scope in force: where its requests go, and the one stream that it is for, if not for all.
pub(super) struct ScopeModel {
    number: u64,
    device: DeviceId,
    pool: PoolId,
    stream: Option<StreamId>,
}

/// The live blocks of a pool at some time: address, bytes, requested bytes, stream.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ModelCheckpoint {
    device: DeviceId,
    pool: PoolId,
    blocks: Vec<(u64, u64, u64, StreamId)>,
}

/// What getting back to a checkpoint did: addresses by stream and address.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ModelRestored {
    /// Of blocks that are live again.
    pub revived: Vec<Addr>,
    /// Of blocks that are not live any more.
    pub stale: Vec<Addr>,
    /// Of blocks that stayed.
    pub kept: Vec<Addr>,
}

impl Model {
    /// A new pool with one reference, under the next id.
    pub fn create_pool(&mut self, device: DeviceId, no_split: bool, use_on_oom: bool) -> PoolId {
        self.pools_made += 1;
        let id = PoolId(0, self.pools_made);
        let pool = PoolModel { id, references: 1, pins: 0, no_split, use_on_oom };
        self.devices[device.index()].pools.push(pool);
        id
    }

    /// One more reference.
    ///
    /// # Panics
    /// If there is no such pool.
    pub fn retain_pool(&mut self, device: DeviceId, id: PoolId) {
        self.devices[device.index()].pool(id).references += 1;
    }

    /// One reference less.
    ///
    /// # Panics
    /// If there is no such pool.
    pub fn release_pool(&mut self, device: DeviceId, id: PoolId) {
        let device = &mut self.devices[device.index()];
        device.pool(id).references -= 1;
        device.end_pools();
    }

    /// The owner of a pool lets it go.
    ///
    /// # Panics
    /// If there is no such pool.
    pub fn drop_pool(&mut self, device: DeviceId, id: PoolId) {
        let pool = self.devices[device.index()].pool(id);
        pool.use_on_oom = false;
        if pool.references == 1 {
            self.empty_pool(device, id);
        }
        self.release_pool(device, id);
    }

    /// Gives the cached memory of one pool back, unless it is pinned.
    ///
    /// # Panics
    /// If there is no such pool.
    pub fn empty_pool(&mut self, device: DeviceId, id: PoolId) {
        let device = &mut self.devices[device.index()];
        if device.pool(id).pins == 0 {
            device.synchronize_pool(&mut self.driver, id);
            device.release_pool(&mut self.driver, id);
        }
    }

    /// Sends requests on `stream`, or on all streams of the device, to a pool. Returns what to call
    /// [`leave`](Model::leave) with. The scope has a reference.
    pub fn enter(&mut self, device: DeviceId, pool: PoolId, stream: Option<StreamId>) -> u64 {
        self.retain_pool(device, pool);
        self.scopes_made += 1;
        let number = self.scopes_made;
        self.scopes.push(ScopeModel { number, device, pool, stream });
        number
    }

    /// Ends a scope.
    ///
    /// # Panics
    /// If there is no such scope.
    pub fn leave(&mut self, number: u64) {
        let at = self.scopes.iter().position(|scope| scope.number == number);
        let scope = self.scopes.remove(at.expect("the scope is in force"));
        self.release_pool(scope.device, scope.pool);
    }

    /// The pool that a request goes to: that of the latest scope that claims it.
    pub(super) fn route(&self, device: DeviceId, stream: StreamId) -> PoolId {
        let claims = |scope: &&ScopeModel| {
            scope.device == device && scope.stream.is_none_or(|only| only == stream)
        };
        self.scopes.iter().rev().find(claims).map_or(PoolId::DEFAULT, |scope| scope.pool)
    }

    /// The private pools of a device and their references, by id.
    pub fn pools(&self, device: DeviceId) -> Vec<(PoolId, usize)> {
        let pools = self.devices[device.index()].pools.iter();
        let mut list: Vec<_> = pools.map(|pool| (pool.id, pool.references)).collect();
        list.sort_unstable();
        list
    }

    /// Remembers the live blocks of a pool and pins it.
    ///
    /// # Panics
    /// If there is no such pool.
    pub fn checkpoint(&mut self, device: DeviceId, pool: PoolId) -> ModelCheckpoint {
        let model = &mut self.devices[device.index()];
        model.pool(pool).pins += 1;
        model.synchronize_pool(&mut self.driver, pool);
        let live = model.blocks.iter().filter(|b| b.pool == pool && b.live);
        let blocks = live.map(|b| (b.addr, b.bytes, b.requested, b.stream)).collect();
        ModelCheckpoint { device, pool, blocks }
    }

    /// Forgets a checkpoint.
    ///
    /// # Panics
    /// If its pool has ended.
    pub fn forget(&mut self, checkpoint: &ModelCheckpoint) {
        self.devices[checkpoint.device.index()].pool(checkpoint.pool).pins -= 1;
    }

    /// Makes the blocks of a checkpoint the live ones of its pool.
    pub fn restore(&mut self, checkpoint: &ModelCheckpoint) -> ModelRestored {
        let device = &mut self.devices[checkpoint.device.index()];
        device.synchronize_pool(&mut self.driver, checkpoint.pool);
        device.restore(&mut self.driver, checkpoint)
    }
}

impl DeviceModel {
    pub(super) fn pool(&mut self, id: PoolId) -> &mut PoolModel {
        let pool = self.pools.iter_mut().find(|pool| pool.id == id);
        pool.expect("the pool exists")
    }

    pub(super) fn is_pinned(&self, id: PoolId) -> bool {
        self.pools.iter().any(|pool| pool.id == id && pool.pins > 0)
    }

    pub(super) fn is_no_split(&self, id: PoolId) -> bool {
        self.pools.iter().any(|pool| pool.id == id && pool.no_split)
    }

    /// A pool ends when nobody refers to it and it has nothing.
    pub(super) fn end_pools(&mut self) {
        let blocks = &self.blocks;
        self.pools.retain(|pool| pool.references > 0 || blocks.iter().any(|b| b.pool == pool.id));
    }

    /// A free block of a pool that helps out, for a request of the default pool.
    pub(super) fn lent(&mut self, driver: &Driver, request: &Request) -> Option<u64> {
        if request.pool != PoolId::DEFAULT {
            return None;
        }
        let helps = |pool: &&PoolModel| pool.use_on_oom && pool.references > 0 && pool.pins == 0;
        let mut ids: Vec<_> = self.pools.iter().filter(helps).map(|pool| pool.id).collect();
        ids.sort_unstable();
        ids.into_iter().find_map(|pool| self.take_cached(driver, &Request { pool, ..*request }))
    }

    /// Gives back what is free in pools that nobody refers to, by id.
    pub(super) fn release_unreferenced(&mut self, driver: &mut Driver) {
        let mut ids: Vec<_> =
            self.pools.iter().filter(|pool| pool.references == 0).map(|pool| pool.id).collect();
        ids.sort_unstable();
        for id in ids {
            self.release_pool(driver, id);
        }
        self.end_pools();
    }

    fn release_pool(&mut self, driver: &mut Driver, id: PoolId) {
        if !self.is_pinned(id) {
            self.release_class(driver, id, true);
            self.release_class(driver, id, false);
            // Addresses for which there never was memory go too.
            let is_unused = |at: usize| !self.blocks[at].mapped && !self.is_split(at);
            let mine = |at: &usize| self.blocks[*at].pool == id && is_unused(*at);
            let unused: Vec<usize> = (0..self.blocks.len()).filter(mine).collect();
            for at in unused.into_iter().rev() {
                self.blocks.remove(at);
            }
        }
    }

    /// Waits for the events of a pool's blocks, and those before them.
    fn synchronize_pool(&mut self, driver: &mut Driver, id: PoolId) {
        for stream in driver.event_order() {
            while self.pending.iter().any(|event| {
                event.stream == stream && self.blocks[self.index(event.block)].pool == id
            }) {
                let first = self.pending.iter().position(|event| event.stream == stream);
                let first = first.expect("an event of the stream");
                driver.wait_until(stream, self.pending[first].position);
                self.take_event(driver, first);
            }
        }
    }

    fn restore(&mut self, driver: &mut Driver, checkpoint: &ModelCheckpoint) -> ModelRestored {
        let mut restored = ModelRestored::default();
        let now: Vec<Block> = {
            let live = self.blocks.iter().filter(|b| b.pool == checkpoint.pool && b.live);
            live.cloned().collect()
        };
        let was = |b: &Block| checkpoint.blocks.contains(&(b.addr, b.bytes, b.requested, b.stream));
        let (kept, stale): (Vec<_>, Vec<_>) = now.into_iter().partition(was);
        for stream in stale.iter().flat_map(|block| block.uses.clone()) {
            driver.finish(stream);
        }
        let mut streams: Vec<StreamId> = stale.iter().map(|block| block.stream).collect();
        streams.extend(checkpoint.blocks.iter().map(|block| block.3));
        streams.extend(kept.iter().map(|block| block.stream));
        streams.sort_unstable();
        streams.dedup();
        for stream in streams {
            for block in stale.iter().filter(|block| block.stream == stream) {
                let at = self.index(block.addr);
                self.blocks[at].uses.clear();
                self.free(driver, Addr::new(block.addr));
                restored.stale.push(Addr::new(block.addr));
            }
            let stays = |addr: u64| kept.iter().any(|block| block.addr == addr);
            for &(addr, bytes, requested, of) in &checkpoint.blocks {
                if of == stream && !stays(addr) {
                    self.revive(driver, checkpoint.pool, addr, bytes, requested);
                    restored.revived.push(Addr::new(addr));
                }
            }
            let kept = kept.iter().filter(|block| block.stream == stream);
            restored.kept.extend(kept.map(|block| Addr::new(block.addr)));
        }
        restored
    }

    /// Hands out a part of a free block: as if it had been cut off first.
    fn revive(&mut self, driver: &mut Driver, pool: PoolId, addr: u64, bytes: u64, requested: u64) {
        let holds = |b: &Block| b.is_free() && b.addr <= addr && addr + bytes <= b.end();
        let mut at = self.blocks.iter().position(holds).expect("free memory there");
        let whole = self.blocks[at].clone();
        let before = if self.is_split(at) { (1, whole.bytes) } else { (0, 0) };
        let mut pieces = 1;
        if whole.addr < addr {
            self.cut(at, addr - whole.addr);
            self.stamp(at);
            at += 1;
            pieces += 1;
        }
        if self.blocks[at].bytes > bytes {
            self.cut(at, bytes);
            self.stamp(at + 1);
            pieces += 1;
        }
        if !whole.is_expandable() && self.is_split(at) {
            change(&mut self.stats.inactive_split, whole.small, pieces - before.0);
            let more = whole.bytes as i64 - before.1 as i64;
            change(&mut self.stats.inactive_split_bytes, whole.small, more);
        }
        let request = Request {
            requested,
            rounded: bytes,
            segment_bytes: 0,
            small: whole.small,
            stream: whole.stream,
            pool,
        };
        self.hand_out(driver, &request, addr);
    }
}
