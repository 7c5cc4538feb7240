//! Finding, checking and starting the driver.

use crate::error::{DriverError, code, known_name};
use crate::symbols::Symbols;
use cudarc::driver::sys;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::fmt;
use std::ptr::NonNull;
use std::sync::OnceLock;

/// A version of CUDA, as the driver states the newest one it supports.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Version {
    /// 12 in 12.8.
    pub major: u32,
    /// 8 in 12.8.
    pub minor: u32,
}

impl Version {
    /// The oldest driver that works: `cuStreamGetId`, which tells streams apart whose raw handles
    /// are equal, came with it.
    pub const MINIMUM: Version = Version { major: 12, minor: 0 };

    /// From the number `cuDriverGetVersion` returns: 1000 × major + 10 × minor.
    fn from_number(number: c_int) -> Self {
        let number = number.max(0).unsigned_abs();
        Version { major: number / 1000, minor: number % 1000 / 10 }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Why there is no driver to call. Found once, at start, and the same ever after.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum LoadError {
    /// No library of the driver's name can be loaded.
    LibraryNotFound,
    /// The library is older than [`Version::MINIMUM`].
    TooOld {
        /// What it supports.
        found: Version,
    },
    /// The library lacks a function that a driver of its age should have.
    MissingSymbol {
        /// The function.
        name: &'static str,
    },
    /// The library is there but would not start (`cuInit`): no GPU, most often.
    Init(DriverError),
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LoadError::LibraryNotFound => f.write_str(
                "the CUDA driver library (libcuda.so.1) was not found: install NVIDIA's driver, \
                 start the container with access to the GPU, or add the library's folder to \
                 LD_LIBRARY_PATH",
            ),
            LoadError::TooOld { found } => write!(
                f,
                "the CUDA driver supports CUDA {found}, and at least {} is needed: update it",
                Version::MINIMUM
            ),
            LoadError::MissingSymbol { name } => write!(
                f,
                "the CUDA driver library has no function {name}: it is not NVIDIA's driver, or its \
                 installation is broken"
            ),
            LoadError::Init(error) => {
                write!(f, "the CUDA driver did not start: {error}{}", hint(error))
            }
        }
    }
}

/// What to do about a failed `cuInit`.
fn hint(error: &DriverError) -> &'static str {
    match error.code {
        code::NO_DEVICE => ": no GPU is visible (see nvidia-smi and CUDA_VISIBLE_DEVICES)",
        code::STUB_LIBRARY => {
            ": this is the toolkit's link-time stub; take its folder out of LD_LIBRARY_PATH"
        }
        code::SYSTEM_DRIVER_MISMATCH => {
            ": library and kernel module are of different versions; reboot or reload the module"
        }
        code::COMPAT_NOT_SUPPORTED_ON_DEVICE => {
            ": the compatibility library does not serve this GPU; use the driver's own"
        }
        code::SYSTEM_NOT_READY => ": the node's GPU services are not up yet; try again",
        _ => "",
    }
}

impl std::error::Error for LoadError {}

/// The loaded driver. One for the process; it is never unloaded.
pub struct Driver {
    symbols: Symbols,
    version: Version,
    error_name: unsafe extern "C" fn(u32, *mut *const c_char) -> u32,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Driver").field("version", &self.version).finish_non_exhaustive()
    }
}

impl Driver {
    /// Loads the driver's library and starts it, the first time; returns the same ever after.
    ///
    /// # Errors
    /// [`LoadError`], whose text says what to do.
    pub fn load() -> Result<&'static Driver, LoadError> {
        static DRIVER: OnceLock<Result<Driver, LoadError>> = OnceLock::new();
        DRIVER.get_or_init(load_library).as_ref().map_err(|error| *error)
    }

    /// Checks and starts a driver whose functions `lookup` finds.
    ///
    /// # Safety
    /// What `lookup` finds must be the driver's function of that name, or one with the same C
    /// signature, and stay loaded.
    pub(crate) unsafe fn start(
        lookup: &dyn Fn(&'static CStr) -> Option<NonNull<c_void>>,
    ) -> Result<Driver, LoadError> {
        let missing = |name| LoadError::MissingSymbol { name };
        let version = lookup(c"cuDriverGetVersion").ok_or(missing("cuDriverGetVersion"))?;
        let error_name = lookup(c"cuGetErrorName").ok_or(missing("cuGetErrorName"))?;
        // SAFETY: the caller vouches that this is cuDriverGetVersion.
        let version = unsafe {
            std::mem::transmute::<NonNull<c_void>, unsafe extern "C" fn(*mut c_int) -> u32>(version)
        };
        // SAFETY: the caller vouches that this is cuGetErrorName.
        let error_name = unsafe {
            std::mem::transmute::<
                NonNull<c_void>,
                unsafe extern "C" fn(u32, *mut *const c_char) -> u32,
            >(error_name)
        };

        let mut number = 0;
        // SAFETY: the place for the result is valid; the call needs no cuInit before it.
        let result = unsafe { version(&raw mut number) };
        if result != code::SUCCESS {
            return Err(LoadError::Init(DriverError::new("cuDriverGetVersion", result)));
        }
        let version = Version::from_number(number);
        if version < Version::MINIMUM {
            return Err(LoadError::TooOld { found: version });
        }

        // SAFETY: passed on from the caller.
        let symbols = unsafe { Symbols::resolve(lookup) }?;
        let driver = Driver { symbols, version, error_name };
        // SAFETY: cuInit takes flags, which must be 0, and may be called at any time.
        unsafe { crate::symbols::call!(driver, init(0)) }.map_err(LoadError::Init)?;
        Ok(driver)
    }

    /// The newest version of CUDA that this driver supports.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The entry points.
    pub(crate) fn symbols(&self) -> &Symbols {
        &self.symbols
    }

    /// A result code as a `Result`.
    pub(crate) fn check(&self, call: &'static str, code: u32) -> Result<(), DriverError> {
        if code == code::SUCCESS { Ok(()) } else { Err(self.error(call, code)) }
    }

    /// The error for a code, with the driver's own name for codes that this crate does not list.
    #[cold]
    fn error(&self, call: &'static str, code: u32) -> DriverError {
        let mut error = DriverError::new(call, code);
        if known_name(code).is_none()
            && let Some(name) = self.name_of(code)
        {
            error.name = name;
        }
        error
    }

    /// What the driver calls a code.
    fn name_of(&self, code: u32) -> Option<&'static str> {
        let mut name = std::ptr::null();
        // SAFETY: the place for the result is valid; unknown codes are refused, not misread.
        let result = unsafe { (self.error_name)(code, &raw mut name) };
        if result != code::SUCCESS || name.is_null() {
            return None;
        }
        // SAFETY: on success the driver returns a string constant of its library, which is never
        // unloaded.
        let name: &'static CStr = unsafe { CStr::from_ptr(name) };
        name.to_str().ok()
    }
}

/// Loads the real library.
fn load_library() -> Result<Driver, LoadError> {
    // SAFETY: runs the initialisers of a library of the driver's name, which is what the user asked
    // for; cudarc closes it again.
    if !unsafe { sys::is_culib_present() } {
        return Err(LoadError::LibraryNotFound);
    }
    // SAFETY: as above. The call panics when no such library can be loaded, which was just ruled
    // out; this one stays open for the life of the process.
    let library = unsafe { sys::culib() };
    let lookup = |name: &'static CStr| {
        // SAFETY: the address itself is read, as an untyped pointer; nothing is called.
        let symbol = unsafe { library.get::<*mut c_void>(name.to_bytes_with_nul()) };
        symbol.ok().and_then(|symbol| NonNull::new(*symbol))
    };
    // SAFETY: a library that goes by the driver's name has the driver's functions under their
    // names, whose signatures are fixed for ever by the suffix (`_v2`); it is never closed.
    unsafe { Driver::start(&lookup) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_driver_states_its_version_as_one_number() {
        assert_eq!(Version::from_number(12080), Version { major: 12, minor: 8 });
        assert_eq!(Version::from_number(13000).to_string(), "13.0");
        assert!(Version::from_number(11080) < Version::MINIMUM);
        assert_eq!(Version::from_number(-1), Version { major: 0, minor: 0 });
    }

    #[test]
    fn loading_works_or_says_what_to_do() {
        match Driver::load() {
            Ok(driver) => assert!(driver.version() >= Version::MINIMUM),
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("driver"), "{text}");
                if error == LoadError::LibraryNotFound {
                    assert!(text.contains("LD_LIBRARY_PATH"), "{text}");
                }
                assert_eq!(Driver::load().err(), Some(error), "the answer stays the same");
            }
        }
    }

    #[test]
    fn a_library_without_the_functions_is_refused() {
        // SAFETY: finds nothing at all.
        let found = unsafe { Driver::start(&|_| None) };
        assert_eq!(found.err(), Some(LoadError::MissingSymbol { name: "cuDriverGetVersion" }));
    }
}
