//! The operations on private pools.

use alloc_core::backend::Stream;
use alloc_core::{Checkpoint, MemPool, PoolOptions, PoolRef, PoolScope, ScopeFilter};

use super::{Outcome, Reference, Trial, same};
use crate::model::{Model, ModelCheckpoint, ModelRestored};
use crate::workload::{Op, Picks};
use crate::{MockBackend, MockStream};

/// How many there may be at once.
const POOLS_MAX: usize = 6;
const SCOPES_MAX: usize = 4;
const CHECKPOINTS_MAX: usize = 3;

/// What refers to pools in a trial.
#[derive(Default)]
pub(super) struct TrialPools {
    owned: Picks<MemPool<MockBackend>>,
    /// With the model's name for it.
    scopes: Picks<(PoolScope<MockBackend>, Option<u64>)>,
    checkpoints: Picks<Taken>,
}

struct Taken {
    checkpoint: Checkpoint,
    of_model: Option<ModelCheckpoint>,
    pool: PoolRef<MockBackend>,
}

impl TrialPools {
    /// An operation that takes one reference away; `None` if there are none left.
    pub(super) fn next_end(&self) -> Option<Op> {
        let ends = [
            (self.scopes.len(), Op::Leave { pick: 0 }),
            (self.checkpoints.len(), Op::Forget { pick: 0 }),
            (self.owned.len(), Op::DropPool { pick: 0 }),
        ];
        ends.into_iter().find(|(count, _)| *count > 0).map(|(_, op)| op)
    }
}

impl Trial {
    pub(super) fn act_on_pools(&mut self, op: &Op) -> Outcome {
        match *op {
            Op::NewPool { stream, no_split, use_on_oom } => {
                let stream = self.stream(stream);
                self.new_pool(&stream, no_split, use_on_oom)
            }
            Op::DropPool { pick } => match self.pools.owned.take(pick) {
                Some(pool) => self.drop_pool(pool),
                None => Ok(()),
            },
            Op::EmptyPool { pick } => {
                let Some(pool) = self.pools.owned.get(pick) else { return Ok(()) };
                let (device, id) = (pool.device(), pool.id());
                let result = pool.empty_cache().map(drop);
                self.unless_injected(result)?;
                self.model(|model| model.empty_pool(device, id));
                Ok(())
            }
            Op::Enter { pick, stream } => self.enter(pick, stream),
            Op::Leave { pick } => {
                if let Some((scope, number)) = self.pools.scopes.take(pick) {
                    drop(scope);
                    self.model(|model| number.into_iter().for_each(|number| model.leave(number)));
                }
                Ok(())
            }
            Op::Checkpoint { pick } => self.checkpoint(pick),
            Op::Restore { pick } => self.restore(pick),
            Op::Forget { pick } => {
                let taken = self.pools.checkpoints.take(pick);
                if let Some(Taken { checkpoint, of_model, pool }) = taken {
                    let (device, id) = (pool.device(), pool.id());
                    drop((checkpoint, pool));
                    self.model(|model| {
                        of_model.iter().for_each(|checkpoint| model.forget(checkpoint));
                        model.release_pool(device, id);
                    });
                }
                Ok(())
            }
            _ => unreachable!("other operations are played elsewhere"),
        }
    }

    fn new_pool(&mut self, stream: &MockStream, no_split: bool, use_on_oom: bool) -> Outcome {
        if self.pools.owned.len() >= POOLS_MAX {
            return Ok(());
        }
        let mut options = PoolOptions::new();
        (options.no_split, options.use_on_oom) = (no_split, use_on_oom);
        let device = stream.device();
        let pool = self.judged.subject.create_pool(device, options);
        let pool = pool.map_err(|error| error.to_string())?;
        let id = pool.id();
        self.pools.owned.push(pool);
        match &mut self.reference {
            Some(Reference { model, .. }) => {
                same("pool id", &id, &model.create_pool(device, no_split, use_on_oom))
            }
            None => Ok(()),
        }
    }

    fn drop_pool(&mut self, pool: MemPool<MockBackend>) -> Outcome {
        let (device, id) = (pool.device(), pool.id());
        let result = pool.release();
        self.unless_injected(result)?;
        self.model(|model| model.drop_pool(device, id));
        Ok(())
    }

    fn enter(&mut self, pick: u32, stream: Option<usize>) -> Outcome {
        let stream = stream.map(|stream| self.stream(stream).id());
        let Some(pool) = self.pools.owned.get(pick) else { return Ok(()) };
        if self.pools.scopes.len() >= SCOPES_MAX {
            return Ok(());
        }
        let (device, id) = (pool.device(), pool.id());
        let filter = stream.map_or(ScopeFilter::CurrentThread, ScopeFilter::Stream);
        let scope = pool.scope(filter);
        let number = self.with_model(|model| model.enter(device, id, stream));
        self.pools.scopes.push((scope, number));
        Ok(())
    }

    fn checkpoint(&mut self, pick: u32) -> Outcome {
        let Some(pool) = self.pools.owned.get(pick) else { return Ok(()) };
        if self.pools.checkpoints.len() >= CHECKPOINTS_MAX {
            return Ok(());
        }
        let (device, id) = (pool.device(), pool.id());
        let pool = PoolRef::clone(pool);
        let checkpoint = match pool.checkpoint() {
            Ok(checkpoint) => checkpoint,
            Err(error) => return self.unless_injected(Err(error)),
        };
        let of_model = self.with_model(|model| {
            model.retain_pool(device, id);
            model.checkpoint(device, id)
        });
        self.pools.checkpoints.push(Taken { checkpoint, of_model, pool });
        Ok(())
    }

    fn restore(&mut self, pick: u32) -> Outcome {
        let Some(taken) = self.pools.checkpoints.get(pick) else { return Ok(()) };
        let restored = match taken.pool.restore(&taken.checkpoint) {
            Ok(restored) => restored,
            Err(error) => return self.unless_injected(Err(error)),
        };
        let judge = self.judged.backend.judge();
        for stale in &restored.stale {
            judge.freed(stale.addr);
        }
        self.live.retain(|addr| restored.stale.iter().all(|stale| stale.addr != *addr));
        for block in &restored.revived {
            let stream = self.streams.iter().find(|stream| stream.id() == block.stream());
            let stream = stream.ok_or("a block of an unknown stream")?;
            judge.allocated(block.addr(), block.bytes(), stream);
            self.live.push(block.addr());
        }
        let got = ModelRestored {
            revived: restored.revived.iter().map(|block| block.addr()).collect(),
            stale: restored.stale.iter().map(|stale| stale.addr).collect(),
            kept: restored.kept,
        };
        match (&mut self.reference, &taken.of_model) {
            (Some(Reference { model, .. }), Some(of_model)) => {
                same("restored", &got, &model.restore(of_model))
            }
            _ => Ok(()),
        }
    }

    fn with_model<T>(&mut self, act: impl FnOnce(&mut Model) -> T) -> Option<T> {
        self.reference.as_mut().map(|reference| act(&mut reference.model))
    }
}
