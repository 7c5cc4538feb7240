//! Device memory with a type and an owner.

use crate::allocator::{CudaAllocError, CudaAllocator};
use crate::error::CudaError;
use crate::stream::CudaStream;
use alloc_core::{Addr, Allocation};
use std::marker::PhantomData;

/// Values that are their bytes: any bits are valid, and there is no padding.
///
/// # Safety
/// Both must hold.
pub unsafe trait Plain: Copy + Send + 'static {}

macro_rules! plain {
    ($($type:ty),*) => {
        $(
            // SAFETY: a number; every bit pattern is one, and all bits count.
            unsafe impl Plain for $type {}
        )*
    };
}

plain!(u8, u16, u32, u64, u128, usize, i8, i16, i32, i64, i128, isize, f32, f64);

/// `count` values of device memory that belong to a stream. Dropping it gives them back for later
/// work on that stream; work on other streams must have been named by
/// [`record_stream`](Self::record_stream).
#[derive(Debug)]
pub struct DeviceBuffer<T: Plain> {
    allocator: CudaAllocator,
    /// `None` only while being dropped.
    allocation: Option<Allocation>,
    count: usize,
    stream: CudaStream,
    values: PhantomData<T>,
}

impl<T: Plain> DeviceBuffer<T> {
    pub(crate) fn new(
        allocator: CudaAllocator,
        allocation: Allocation,
        count: usize,
        stream: CudaStream,
    ) -> Self {
        DeviceBuffer { allocator, allocation: Some(allocation), count, stream, values: PhantomData }
    }

    /// Where it starts on the device; [`Addr::NULL`] if it is empty.
    pub fn addr(&self) -> Addr {
        self.allocation.as_ref().map_or(Addr::NULL, Allocation::addr)
    }

    /// How many values.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// How many bytes.
    pub fn bytes(&self) -> u64 {
        (self.count * size_of::<T>()) as u64
    }

    /// The stream it belongs to.
    pub fn stream(&self) -> &CudaStream {
        &self.stream
    }

    /// Names another stream whose work, queued so far or until the buffer is dropped, uses it.
    ///
    /// # Errors
    /// As [`record_stream`](alloc_core::CachingAllocator::record_stream) there.
    pub fn record_stream(&self, stream: &CudaStream) -> Result<(), CudaAllocError> {
        match &self.allocation {
            Some(allocation) => self.allocator.record_stream(allocation, stream),
            None => Ok(()),
        }
    }

    /// Queues setting all bytes to 0.
    ///
    /// # Errors
    /// Whatever the driver reports.
    pub fn clear(&mut self) -> Result<(), CudaError> {
        if self.is_empty() {
            return Ok(());
        }
        // SAFETY: the bytes are device memory of this buffer alone.
        Ok(unsafe { self.stream.driver_stream().fill(self.addr().get(), 0, self.bytes()) }?)
    }

    /// Copies values from the host, in order with the stream's work, and waits for it.
    ///
    /// # Errors
    /// Whatever the driver reports, failures of the stream's earlier work included.
    ///
    /// # Panics
    /// Unless there are as many values as the buffer holds.
    pub fn copy_from_host(&mut self, values: &[T]) -> Result<(), CudaError> {
        assert_eq!(values.len(), self.count, "as many values as the buffer holds");
        if self.is_empty() {
            return Ok(());
        }
        let stream = self.stream.driver_stream();
        let (from, to) = (values.as_ptr().cast::<u8>(), self.addr().get());
        // SAFETY: the source is a slice, borrowed until the wait below is over; the target is device
        // memory of this buffer alone.
        unsafe { stream.copy_to_device(to, from, self.bytes()) }?;
        Ok(stream.synchronize()?)
    }

    /// Copies the values to the host, in order with the stream's work, and waits for it.
    ///
    /// # Errors
    /// Whatever the driver reports, failures of the stream's earlier work included.
    ///
    /// # Panics
    /// Unless there is room for as many values as the buffer holds.
    pub fn copy_to_host(&self, values: &mut [T]) -> Result<(), CudaError> {
        assert_eq!(values.len(), self.count, "room for as many values as the buffer holds");
        if self.is_empty() {
            return Ok(());
        }
        let stream = self.stream.driver_stream();
        let (to, from) = (values.as_mut_ptr().cast::<u8>(), self.addr().get());
        // SAFETY: the target is a slice, borrowed until the wait below is over, and any bytes are
        // valid values.
        unsafe { stream.copy_to_host(to, from, self.bytes()) }?;
        Ok(stream.synchronize()?)
    }

    /// The values, on the host.
    ///
    /// # Errors
    /// As [`copy_to_host`](Self::copy_to_host).
    pub fn to_vec(&self) -> Result<Vec<T>, CudaError>
    where
        T: Default,
    {
        let mut values = vec![T::default(); self.count];
        self.copy_to_host(&mut values)?;
        Ok(values)
    }

    /// Gives the memory back now.
    ///
    /// # Errors
    /// As [`free`](alloc_core::CachingAllocator::free) there; the memory stays allocated then.
    pub fn free(mut self) -> Result<(), CudaAllocError> {
        self.give_back()
    }

    /// Hands the memory to the interface by raw address: whoever has the address must free it with
    /// [`free_raw`](alloc_core::CachingAllocator::free_raw).
    pub fn into_raw(mut self) -> Addr {
        let addr = self.addr();
        self.allocation = None;
        addr
    }

    /// The allocator it is from.
    pub fn allocator(&self) -> &CudaAllocator {
        &self.allocator
    }

    /// A buffer of nothing, to leave in the place of this one.
    #[cfg(feature = "cudarc")]
    pub(crate) fn empty_of_same_stream(&self) -> Self {
        DeviceBuffer {
            allocator: self.allocator.clone(),
            allocation: None,
            count: 0,
            stream: self.stream.clone(),
            values: PhantomData,
        }
    }

    fn give_back(&mut self) -> Result<(), CudaAllocError> {
        match self.allocation.take() {
            Some(allocation) => self.allocator.free(allocation).map_err(|refused| refused.error),
            None => Ok(()),
        }
    }
}

impl<T: Plain> Drop for DeviceBuffer<T> {
    fn drop(&mut self) {
        // Fails when the driver is gone, and the memory with it, or when an event cannot be
        // recorded; then the memory stays allocated, which is safe.
        let _ = self.give_back();
    }
}
