//! Conversions to and from cudarc's safe types.

use crate::backend::CudaBackend;
use crate::buffer::{DeviceBuffer, Plain};
use crate::error::CudaError;
use crate::stream::CudaStream;
use alloc_core::DeviceId;
use alloc_core::backend::Stream as _;
use cudarc::driver::{CudaContext, CudaSlice, CudaStream as CudarcStream, CudaViewMut, DeviceRepr};
use std::ops::Deref;
use std::sync::Arc;

impl CudaBackend {
    /// Adopts a stream of cudarc, holding on to it for as long as any clone exists.
    ///
    /// # Errors
    /// [`CudaError::WrongContext`] if it is not of its device's primary context; or whatever the
    /// driver reports.
    pub fn adopt_cudarc(&self, stream: &Arc<CudarcStream>) -> Result<CudaStream, CudaError> {
        let device = device_of(stream.context());
        if !stream.context().is_primary() {
            return Err(CudaError::WrongContext { device });
        }
        // SAFETY: cudarc destroys the stream with the last `Arc`, one of which is held here.
        unsafe { self.adopt_kept(device, stream.cu_stream().cast(), stream.clone()) }
    }
}

impl CudaStream {
    /// The same stream for cudarc, of its `context` for the same device. A stream made here is never
    /// destroyed after this, since nothing tells when cudarc is done with it.
    ///
    /// # Errors
    /// [`CudaError::ForeignStream`] if it was adopted: then cudarc's own is at hand, or somebody else
    /// owns it. [`CudaError::WrongContext`] if `context` is not the primary one of its device.
    pub fn to_cudarc(&self, context: &Arc<CudaContext>) -> Result<Arc<CudarcStream>, CudaError> {
        if self.is_foreign() {
            return Err(CudaError::ForeignStream);
        }
        if !context.is_primary() || device_of(context) != self.device() {
            return Err(CudaError::WrongContext { device: self.device() });
        }
        std::mem::forget(self.clone());
        // SAFETY: the stream is of the device's primary context, and lives for ever now. Special
        // handles mean the same in cudarc.
        Ok(unsafe { context.wrap_borrowed_stream(self.raw().cast()) })
    }
}

/// The number of a context's device.
fn device_of(context: &CudaContext) -> DeviceId {
    DeviceId::new(u16::try_from(context.ordinal()).unwrap_or(u16::MAX))
}

/// The stream is not the one that the buffer belongs to. The buffer comes back.
#[derive(Debug)]
pub struct OtherStream<T: Plain>(pub DeviceBuffer<T>);

impl<T: Plain + DeviceRepr> DeviceBuffer<T> {
    /// Lends the memory to cudarc, as a slice of `stream`, which must be the buffer's own.
    ///
    /// # Errors
    /// [`OtherStream`] with the buffer, if it is not.
    pub fn into_cudarc(self, stream: &Arc<CudarcStream>) -> Result<CudarcSlice<T>, OtherStream<T>> {
        match self.allocator().backend().adopt_cudarc(stream) {
            Ok(adopted) if adopted == *self.stream() && !self.is_empty() => {
                // SAFETY: device memory of so many values, owned by the buffer that the result
                // keeps; any bits are valid values. The result never lets cudarc free it.
                let slice = unsafe { stream.upgrade_device_ptr(self.addr().get(), self.len()) };
                Ok(CudarcSlice { slice: Some(slice), buffer: self })
            }
            _ => Err(OtherStream(self)),
        }
    }
}

/// Memory of our allocator as a slice of cudarc's. When dropped it goes back to the allocator, after
/// whatever cudarc has queued with it on any stream.
#[derive(Debug)]
pub struct CudarcSlice<T: Plain> {
    /// `None` only while being dropped or converted.
    slice: Option<CudaSlice<T>>,
    buffer: DeviceBuffer<T>,
}

impl<T: Plain> CudarcSlice<T> {
    /// Takes the memory back from cudarc.
    pub fn into_buffer(mut self) -> DeviceBuffer<T> {
        self.end();
        let empty = self.buffer.empty_of_same_stream();
        std::mem::replace(&mut self.buffer, empty)
    }

    /// The values for cudarc to write. (A `&mut CudaSlice` could be swapped for another, and cudarc
    /// would free our memory.)
    ///
    /// # Panics
    /// Never: the slice is there until the value is consumed.
    pub fn view_mut(&mut self) -> CudaViewMut<'_, T> {
        self.slice.as_mut().expect("there until the end").as_view_mut()
    }

    /// Ends cudarc's part: the buffer's stream waits for the work that cudarc tracked on others.
    fn end(&mut self) {
        if let Some(slice) = self.slice.take() {
            let _address = slice.leak();
        }
    }
}

impl<T: Plain> Deref for CudarcSlice<T> {
    type Target = CudaSlice<T>;

    fn deref(&self) -> &CudaSlice<T> {
        self.slice.as_ref().expect("there until the end")
    }
}

impl<T: Plain> Drop for CudarcSlice<T> {
    fn drop(&mut self) {
        self.end();
    }
}
