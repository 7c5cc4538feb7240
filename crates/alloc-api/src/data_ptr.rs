//! A pointer that separates the address a user sees from the owner that is released.

use crate::device::Device;
use alloc_core::Addr;
use std::any::{Any, TypeId, type_name};
use std::fmt;
use std::marker::PhantomData;

/// How a context is released. A type without values: being this type is what tells one deleter from
/// another, so that a [`DataPtr`] can be asked whose it is.
///
/// The context is passed by value, so it is released at most once, and by the right function.
pub trait Deleter: Sized + 'static {
    /// What is owned.
    type Context: 'static;

    /// Releases it. Runs when the pointer is dropped or cleared, on whatever thread does so. Should
    /// not panic: a panic passes through the drop, and the context counts as released.
    fn release(context: Self::Context);

    /// The one address that the memory can be freed by, if there is one. A pointer is *simple* if
    /// this is also the address that the user sees.
    fn raw_addr(_context: &Self::Context) -> Option<Addr> {
        None
    }

    /// Forgets the context of a simple pointer, whose address stands for the memory from now on.
    /// Contexts that hold more than the memory let go of the rest here.
    fn disown(context: Self::Context) {
        std::mem::forget(context);
    }
}

/// The deleter of contexts that release what they own when they are dropped.
#[derive(Debug)]
pub struct Dropping<T>(PhantomData<fn(T)>);

impl<T: 'static> Deleter for Dropping<T> {
    type Context = T;

    fn release(context: T) {
        drop(context);
    }
}

/// A context together with its deleter, whichever they are. Implemented by this crate only.
pub trait Owner: Any + sealed::Sealed {
    #[doc(hidden)]
    fn deleter(&self) -> TypeId;
    #[doc(hidden)]
    fn deleter_name(&self) -> &'static str;
    #[doc(hidden)]
    fn raw_addr(&self) -> Option<Addr>;
    #[doc(hidden)]
    fn as_any(&self) -> &dyn Any;
    #[doc(hidden)]
    fn as_any_mut(&mut self) -> &mut dyn Any;
    #[doc(hidden)]
    fn into_any(self: Box<Self>) -> Box<dyn Any>;
    #[doc(hidden)]
    fn disown(self: Box<Self>);
}

mod sealed {
    pub trait Sealed {}
    impl<D: super::Deleter> Sealed for super::Held<D> {}
}

/// A context that its deleter releases when it is dropped. `Send` if and only if the context is.
struct Held<D: Deleter> {
    /// `None` once taken out or released.
    context: Option<D::Context>,
}

impl<D: Deleter> Held<D> {
    fn new(context: D::Context) -> Self {
        Held { context: Some(context) }
    }
}

impl<D: Deleter> Drop for Held<D> {
    fn drop(&mut self) {
        if let Some(context) = self.context.take() {
            D::release(context);
        }
    }
}

impl<D: Deleter> Owner for Held<D> {
    fn deleter(&self) -> TypeId {
        TypeId::of::<D>()
    }

    fn deleter_name(&self) -> &'static str {
        type_name::<D>()
    }

    fn raw_addr(&self) -> Option<Addr> {
        self.context.as_ref().and_then(D::raw_addr)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }

    fn as_any_mut(&mut self) -> &mut dyn Any {
        self
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any> {
        self
    }

    fn disown(mut self: Box<Self>) {
        if let Some(context) = self.context.take() {
            D::disown(context);
        }
    }
}

/// An address with the owner that is released for it, and the device it is on.
///
/// The address is what users work with; the owner is what is released, exactly once, when the
/// pointer is dropped. The two need not agree: the address may lie inside the memory that is owned,
/// be null while something is owned, or be borrowed from somebody else. A null pointer still knows
/// its device.
///
/// `DataPtr` can be sent to other threads, and so can its context. A context that must stay on its
/// thread goes into a [`LocalDataPtr`], which stays there too.
///
/// ```
/// use alloc_api::{DataPtr, Device};
/// use alloc_core::Addr;
///
/// let memory = vec![0u8; 64];
/// let start = Addr::new(memory.as_ptr().addr() as u64);
/// let tail = DataPtr::owned(start + 16, memory, Device::CPU); // 16 bytes into what it owns
/// assert!(!tail.is_simple());
/// drop(tail); // the vector goes
/// ```
pub struct DataPtr<O: ?Sized + Owner = dyn Owner + Send> {
    data: Addr,
    owner: Option<Box<O>>,
    device: Device,
}

/// A [`DataPtr`] whose context stays on its thread.
///
/// ```compile_fail
/// use alloc_api::{Device, LocalDataPtr};
/// let local = LocalDataPtr::owned_locally(alloc_core::Addr::NULL, std::rc::Rc::new(1), Device::CPU);
/// std::thread::spawn(move || drop(local));
/// ```
///
/// Nor can such a context be put into a [`DataPtr`]:
///
/// ```compile_fail
/// use alloc_api::{DataPtr, Device};
/// let pointer = DataPtr::owned(alloc_core::Addr::NULL, std::rc::Rc::new(1), Device::CPU);
/// ```
pub type LocalDataPtr = DataPtr<dyn Owner>;

/// The address cannot stand for the owner: they differ, or the owner has no address.
#[derive(Debug, thiserror::Error)]
#[error("the memory at {} cannot be freed by its address alone: {}", .0.get(), .0.describe_owner())]
pub struct NotSimple(pub DataPtr);

macro_rules! with_contexts {
    ($owner:ty, $with_context:ident, $owned:ident $(, $send:ident)?) => {
        impl DataPtr<$owner> {
            /// A pointer that owns `context`, which `D` will release, whatever `data` is.
            pub fn $with_context<D: Deleter>(data: Addr, context: D::Context, device: Device) -> Self
            where
                D::Context: Sized $(+ $send)?,
            {
                DataPtr { data, owner: Some(Box::new(Held::<D>::new(context))), device }
            }

            /// A pointer that owns `owner`, which is dropped with it.
            pub fn $owned<T: 'static $(+ $send)?>(data: Addr, owner: T, device: Device) -> Self {
                Self::$with_context::<Dropping<T>>(data, owner, device)
            }

            /// Replaces the deleter if it is `Old`; whether it was. The context stays.
            #[must_use = "the deleter is unchanged if it was another one"]
            pub fn compare_exchange_deleter<Old, New>(&mut self) -> bool
            where
                Old: Deleter,
                New: Deleter<Context = Old::Context>,
                Old::Context: Sized $(+ $send)?,
            {
                let Some(context) = self.take_context::<Old>() else { return false };
                self.owner = Some(Box::new(Held::<New>::new(context)));
                true
            }
        }
    };
}

with_contexts!(dyn Owner + Send, with_context, owned, Send);
with_contexts!(dyn Owner, with_local_context, owned_locally);

impl<O: ?Sized + Owner> DataPtr<O> {
    /// The address that the user sees.
    pub fn get(&self) -> Addr {
        self.data
    }

    /// Changes the address that the user sees. What is owned stays.
    pub fn set_addr(&mut self, data: Addr) {
        self.data = data;
    }

    /// Where the memory is.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Says that the memory is elsewhere. Nothing moves.
    pub fn set_device(&mut self, device: Device) {
        self.device = device;
    }

    /// Whether there is neither an address nor an owner.
    pub fn is_null(&self) -> bool {
        self.data.is_null() && self.owner.is_none()
    }

    /// Whether something will be released.
    pub fn is_owner(&self) -> bool {
        self.owner.is_some()
    }

    /// Whether the address that the user sees is the one that the memory can be freed by, so that the
    /// address alone can stand for the pointer. True of null, false of what is borrowed.
    pub fn is_simple(&self) -> bool {
        match &self.owner {
            None => self.data.is_null(),
            Some(owner) => owner.raw_addr() == Some(self.data),
        }
    }

    /// Releases what is owned, then forgets the address. The device stays.
    pub fn clear(&mut self) {
        self.data = Addr::NULL;
        self.owner = None;
    }

    /// Takes the whole pointer out and leaves null on the same device.
    pub fn take(&mut self) -> Self {
        DataPtr {
            data: std::mem::take(&mut self.data),
            owner: self.owner.take(),
            device: self.device,
        }
    }

    /// Whether `D` releases what is owned.
    pub fn has_deleter<D: Deleter>(&self) -> bool {
        self.owner.as_ref().is_some_and(|owner| owner.deleter() == TypeId::of::<D>())
    }

    /// The context, if `D` is its deleter.
    pub fn cast_context<D: Deleter>(&self) -> Option<&D::Context> {
        self.owner.as_ref()?.as_any().downcast_ref::<Held<D>>()?.context.as_ref()
    }

    /// The context, to change, if `D` is its deleter.
    pub fn cast_context_mut<D: Deleter>(&mut self) -> Option<&mut D::Context> {
        self.owner.as_mut()?.as_any_mut().downcast_mut::<Held<D>>()?.context.as_mut()
    }

    /// Moves the context out, if `D` is its deleter, which then does not run. The address stays, as
    /// one that is borrowed.
    pub fn take_context<D: Deleter>(&mut self) -> Option<D::Context> {
        if !self.has_deleter::<D>() {
            return None;
        }
        let mut held = self.owner.take()?.into_any().downcast::<Held<D>>().ok()?;
        held.context.take()
    }

    /// Moves the owner out, whatever it is, into a pointer of its own with the same address; this one
    /// becomes borrowed.
    pub fn take_owner(&mut self) -> Self {
        DataPtr { data: self.data, owner: self.owner.take(), device: self.device }
    }

    fn describe_owner(&self) -> String {
        match &self.owner {
            None => "it is borrowed".to_owned(),
            Some(owner) => match owner.raw_addr() {
                Some(addr) => format!("its owner ({}) has it from {addr}", owner.deleter_name()),
                None => format!("its owner ({}) has no address", owner.deleter_name()),
            },
        }
    }
}

impl DataPtr {
    /// No address and no owner, on a device.
    pub fn null(device: Device) -> Self {
        DataPtr { data: Addr::NULL, owner: None, device }
    }

    /// An address that somebody else owns.
    pub fn borrowed(data: Addr, device: Device) -> Self {
        DataPtr { data, owner: None, device }
    }

    /// Gives the pointer up for its address, by which the memory must be freed from now on. Nothing is
    /// released, and the context is forgotten.
    ///
    /// # Errors
    /// Hands the pointer back unless it [is simple](Self::is_simple).
    pub fn into_addr(mut self) -> Result<Addr, NotSimple> {
        if !self.is_simple() {
            return Err(NotSimple(self));
        }
        if let Some(owner) = self.owner.take() {
            owner.disown();
        }
        Ok(self.data)
    }

    /// The same pointer, from now on kept on this thread.
    pub fn into_local(mut self) -> LocalDataPtr {
        let owner = self.owner.take().map(|owner| owner as Box<dyn Owner>);
        DataPtr { data: self.data, owner, device: self.device }
    }
}

/// Null on the CPU.
impl Default for DataPtr {
    fn default() -> Self {
        DataPtr::null(Device::CPU)
    }
}

impl<O: ?Sized + Owner> fmt::Debug for DataPtr<O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataPtr")
            .field("data", &self.data)
            .field("deleter", &self.owner.as_ref().map(|owner| owner.deleter_name()))
            .field("device", &self.device)
            .finish()
    }
}
