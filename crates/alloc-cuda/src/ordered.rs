//! The driver's stream-ordered pools.

use crate::backend::CudaBackend;
use crate::error::CudaError;
use crate::event::CudaEvent;
use crate::stream::CudaStream;
use alloc_core::backend::Refused;
use alloc_core::ordered::{
    OrderedMemory, PoolOptions, PoolReuse, PoolUsage, StreamOrdered, StreamWait,
};
use alloc_core::{Addr, DeviceId};
use cuda_driver::{
    Attribute, Device, DriverError, MemoryPool, PoolCounter, PoolMemory, PoolReuseRule, code,
};

/// A pool of the driver's. One that was created leaks unless it is destroyed.
#[derive(Debug)]
pub struct CudaPool {
    pool: MemoryPool,
}

/// Memory of a [`CudaPool`]. Dropping it leaks: work may still be using it.
#[derive(Debug)]
pub struct CudaOrdered {
    memory: PoolMemory,
}

impl OrderedMemory for CudaOrdered {
    fn addr(&self) -> Addr {
        Addr::new(self.memory.addr())
    }

    fn bytes(&self) -> u64 {
        self.memory.bytes()
    }
}

impl StreamWait for CudaBackend {
    fn wait_event(&self, stream: &CudaStream, event: &CudaEvent) -> Result<(), CudaError> {
        event.order(stream.order())
    }
}

impl CudaBackend {
    /// The driver's device, if it has pools.
    fn device_with_pools(&self, device: DeviceId) -> Result<Device, CudaError> {
        if self.has_pools(device)? {
            return self.driver_device(device);
        }
        Err(DriverError::new("cuMemPoolCreate", code::NOT_SUPPORTED).into())
    }
}

/// Where there is no need of a context none is made: pools are the device's.
impl StreamOrdered for CudaBackend {
    type Pool = CudaPool;
    type Ordered = CudaOrdered;

    fn has_pools(&self, device: DeviceId) -> Result<bool, CudaError> {
        Ok(self.driver_device(device)?.supports(Attribute::MemoryPools)?)
    }

    fn default_pool(&self, device: DeviceId) -> Result<CudaPool, CudaError> {
        let pool = MemoryPool::default_of(self.device_with_pools(device)?)?;
        Ok(CudaPool { pool })
    }

    fn create_pool(&self, device: DeviceId, bytes_max: Option<u64>) -> Result<CudaPool, CudaError> {
        let _relaxed = self.relaxed()?;
        let pool = MemoryPool::create(self.device_with_pools(device)?, bytes_max)?;
        Ok(CudaPool { pool })
    }

    fn destroy_pool(&self, pool: CudaPool) -> Result<(), Refused<CudaPool, CudaError>> {
        let _relaxed = match self.relaxed() {
            Ok(relaxed) => relaxed,
            Err(error) => return Err(Refused { value: pool, error }),
        };
        pool.pool.destroy().map_err(|refused| Refused {
            value: CudaPool { pool: refused.value },
            error: refused.error.into(),
        })
    }

    fn allocate_ordered(
        &self,
        pool: &CudaPool,
        bytes: u64,
        stream: &CudaStream,
    ) -> Result<CudaOrdered, CudaError> {
        let memory = pool.pool.allocate(bytes, stream.order())?;
        Ok(CudaOrdered { memory })
    }

    fn free_ordered(
        &self,
        memory: CudaOrdered,
        stream: &CudaStream,
    ) -> Result<(), Refused<CudaOrdered, CudaError>> {
        memory.memory.free(stream.order()).map_err(|refused| Refused {
            value: CudaOrdered { memory: refused.value },
            error: refused.error.into(),
        })
    }

    fn set_pool_options(&self, pool: &CudaPool, options: PoolOptions) -> Result<(), CudaError> {
        let PoolReuse { follow_events, opportunistic, internal_dependencies } = options.reuse;
        pool.pool.set_reuse(PoolReuseRule::FollowEvents, follow_events)?;
        pool.pool.set_reuse(PoolReuseRule::Opportunistic, opportunistic)?;
        pool.pool.set_reuse(PoolReuseRule::InternalDependencies, internal_dependencies)?;
        Ok(pool.pool.set_release_threshold(options.release_threshold)?)
    }

    fn pool_options(&self, pool: &CudaPool) -> Result<PoolOptions, CudaError> {
        let reuse = PoolReuse {
            follow_events: pool.pool.reuse(PoolReuseRule::FollowEvents)?,
            opportunistic: pool.pool.reuse(PoolReuseRule::Opportunistic)?,
            internal_dependencies: pool.pool.reuse(PoolReuseRule::InternalDependencies)?,
        };
        Ok(PoolOptions { reuse, release_threshold: pool.pool.release_threshold()? })
    }

    fn pool_usage(&self, pool: &CudaPool) -> Result<PoolUsage, CudaError> {
        Ok(PoolUsage {
            reserved: pool.pool.counter(PoolCounter::ReservedNow)?,
            reserved_peak: pool.pool.counter(PoolCounter::ReservedPeak)?,
            used: pool.pool.counter(PoolCounter::UsedNow)?,
            used_peak: pool.pool.counter(PoolCounter::UsedPeak)?,
        })
    }

    fn reset_pool_peaks(&self, pool: &CudaPool) -> Result<(), CudaError> {
        Ok(pool.pool.reset_peaks()?)
    }

    fn trim_pool(&self, pool: &CudaPool, keep_bytes: u64) -> Result<(), CudaError> {
        let _relaxed = self.relaxed()?;
        Ok(pool.pool.trim(keep_bytes)?)
    }
}
