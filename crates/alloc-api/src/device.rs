//! What kind of device memory is on, and which one.

use alloc_core::DeviceId;
use std::fmt;
use std::str::FromStr;

/// A kind of device.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum DeviceType {
    /// The host.
    Cpu,
    /// GPUs of NVIDIA.
    Cuda,
    /// GPUs of AMD.
    Hip,
    /// GPUs of Intel.
    Xpu,
    /// GPUs of Apple.
    Mps,
    /// Shapes without memory.
    Meta,
    /// A kind that this crate has no name for.
    Other(u8),
}

impl DeviceType {
    /// The kinds that have a name.
    pub const NAMED: [DeviceType; 6] = [
        DeviceType::Cpu,
        DeviceType::Cuda,
        DeviceType::Hip,
        DeviceType::Xpu,
        DeviceType::Mps,
        DeviceType::Meta,
    ];
}

impl fmt::Display for DeviceType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DeviceType::Cpu => "cpu",
            DeviceType::Cuda => "cuda",
            DeviceType::Hip => "hip",
            DeviceType::Xpu => "xpu",
            DeviceType::Mps => "mps",
            DeviceType::Meta => "meta",
            DeviceType::Other(number) => return write!(f, "other{number}"),
        })
    }
}

/// A device: a kind and an index, as in `cuda:1`. There is one host, which is `cpu:0`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Device {
    /// Its kind.
    pub kind: DeviceType,
    /// Which of that kind, counted from 0.
    pub index: DeviceId,
}

impl Device {
    /// The host.
    pub const CPU: Device = Device { kind: DeviceType::Cpu, index: DeviceId::new(0) };

    /// Device `index` of a kind.
    pub const fn new(kind: DeviceType, index: DeviceId) -> Self {
        Device { kind, index }
    }

    /// GPU `index` of NVIDIA's.
    pub const fn cuda(index: u16) -> Self {
        Device::new(DeviceType::Cuda, DeviceId::new(index))
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind, self.index.index())
    }
}

/// A text that names no device.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "`{0}` is no device: write a kind such as cpu, cuda or hip, then optionally a colon and a number"
)]
pub struct ParseDeviceError(String);

/// Reads `cuda:1`; without a number it is device 0.
impl FromStr for Device {
    type Err = ParseDeviceError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let wrong = || ParseDeviceError(text.to_owned());
        let (name, index) = match text.split_once(':') {
            None => (text, 0),
            Some((name, number)) => (name, number.parse().map_err(|_| wrong())?),
        };
        let named = DeviceType::NAMED.into_iter().find(|kind| kind.to_string() == name);
        let other = || name.strip_prefix("other")?.parse().ok().map(DeviceType::Other);
        let kind = named.or_else(other).ok_or_else(wrong)?;
        Ok(Device::new(kind, DeviceId::new(index)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_read_as_they_are_written() {
        let kinds = DeviceType::NAMED.into_iter().chain([DeviceType::Other(7)]);
        for device in kinds.map(|kind| Device::new(kind, DeviceId::new(3))) {
            assert_eq!(device.to_string().parse(), Ok(device));
        }
        assert_eq!("cuda".parse(), Ok(Device::cuda(0)));
        assert_eq!(Device::CPU.to_string(), "cpu:0");
        for wrong in ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:70000", "other", ":1"] {
            assert!(wrong.parse::<Device>().is_err(), "{wrong}");
        }
    }
}
