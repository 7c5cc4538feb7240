//! Device memory of the imitation: spans of bytes at made-up addresses, direct or mapped.

use crate::error::code;
use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

/// A result code as an error.
pub(super) type Code = u32;

/// The driver's unit: sizes round up to it, addresses and physical memory are multiples of it.
pub(super) const PAGE: u64 = 2 << 20;

/// Bits of `CUmemAllocationHandleType`.
pub(super) const POSIX_FD: u32 = 1;
pub(super) const FABRIC: u32 = 8;

/// Which file a descriptor is of.
fn inode(descriptor: BorrowedFd<'_>) -> Result<u64, Code> {
    let file = descriptor.try_clone_to_owned().map(File::from);
    let info = file.and_then(|file| file.metadata()).map_err(|_| code::OPERATING_SYSTEM)?;
    Ok(info.ino())
}

/// Memory of one call to `cuMemAlloc` or `cuMemCreate`.
struct Span {
    device: usize,
    bytes: Vec<u8>,
}

/// Physical memory seen at an address.
struct Mapping {
    bytes: u64,
    physical: u64,
    /// Devices that may use it.
    access: Vec<usize>,
}

/// Physical memory and who still holds it.
struct Physical {
    span: Span,
    mappings: u32,
    /// Handles that mean it.
    handles: u32,
    /// What it can be exported as: bits of `CUmemAllocationHandleType`.
    kinds: u32,
    /// A descriptor that stands for it, once it was exported as one.
    identity: Option<std::io::PipeReader>,
}

/// Memory of `cuMemAlloc` that was opened as another process would.
struct Opened {
    target: u64,
    bytes: u64,
}

/// How much a device has.
struct Capacity {
    total: u64,
    used: u64,
}

/// All memory of all devices, in one address space as on real systems.
#[derive(Default)]
pub(super) struct Memory {
    devices: Vec<Capacity>,
    direct: BTreeMap<u64, Span>,
    reserved: BTreeMap<u64, u64>,
    physical: BTreeMap<u64, Physical>,
    /// What handles of physical memory mean.
    handles: BTreeMap<u64, u64>,
    opened: BTreeMap<u64, Opened>,
    /// Which device's kernel is running, and which devices' memory it may reach.
    pub(super) running: Option<(usize, Vec<usize>)>,
    mapped: BTreeMap<u64, Mapping>,
    next_addr: u64,
    next_handle: u64,
    /// Whether `cuMemAlloc` returns addresses that are not multiples of [`PAGE`].
    pub(super) odd_addresses: bool,
}

impl Memory {
    pub(super) fn new(totals: &[u64], first_addr: u64) -> Self {
        let devices = totals.iter().map(|&total| Capacity { total, used: 0 }).collect();
        Memory { devices, next_addr: first_addr, next_handle: 1, ..Memory::default() }
    }

    /// (free, total) of a device.
    pub(super) fn info(&self, device: usize) -> (u64, u64) {
        let Capacity { total, used } = self.devices[device];
        (total - used, total)
    }

    /// Spans, ranges, physical memory and mappings not given back yet.
    pub(super) fn outstanding(&self) -> usize {
        let physical = self.physical.len() + self.handles.len();
        self.direct.len() + self.opened.len() + self.reserved.len() + physical + self.mapped.len()
    }

    fn take(&mut self, device: usize, bytes: u64) -> Result<(), Code> {
        let capacity = &mut self.devices[device];
        if bytes > capacity.total - capacity.used {
            return Err(code::OUT_OF_MEMORY);
        }
        capacity.used += bytes;
        Ok(())
    }

    fn addresses(&mut self, bytes: u64, align: u64) -> u64 {
        let base = self.next_addr.next_multiple_of(align.max(PAGE));
        // A page is left out after each, so that running off the end is noticed.
        self.next_addr = base + bytes.next_multiple_of(PAGE) + PAGE;
        base
    }

    pub(super) fn allocate(&mut self, device: usize, bytes: u64) -> Result<u64, Code> {
        if bytes == 0 {
            return Err(code::INVALID_VALUE);
        }
        if bytes > self.devices[device].total {
            return Err(code::OUT_OF_MEMORY);
        }
        self.take(device, bytes.next_multiple_of(PAGE))?;
        let addr = self.addresses(bytes, PAGE) + u64::from(self.odd_addresses) * 512;
        self.direct.insert(addr, Span { device, bytes: vec![0; bytes as usize] });
        Ok(addr)
    }

    pub(super) fn device_of(&self, addr: u64) -> Result<usize, Code> {
        self.direct.get(&addr).map(|span| span.device).ok_or(code::INVALID_VALUE)
    }

    pub(super) fn free(&mut self, addr: u64) -> Result<(), Code> {
        let span = self.direct.remove(&addr).ok_or(code::INVALID_VALUE)?;
        self.devices[span.device].used -= (span.bytes.len() as u64).next_multiple_of(PAGE);
        Ok(())
    }

    pub(super) fn reserve(&mut self, bytes: u64, align: u64) -> Result<u64, Code> {
        if bytes == 0 || !bytes.is_multiple_of(PAGE) || !(align == 0 || align.is_power_of_two()) {
            return Err(code::INVALID_VALUE);
        }
        if bytes > 1 << 46 {
            return Err(code::OUT_OF_MEMORY);
        }
        let base = self.addresses(bytes, align);
        self.reserved.insert(base, bytes);
        Ok(base)
    }

    pub(super) fn unreserve(&mut self, base: u64, bytes: u64) -> Result<(), Code> {
        let known = self.reserved.get(&base) == Some(&bytes);
        if !known || self.mapped.range(base..base + bytes).next().is_some() {
            return Err(code::INVALID_VALUE);
        }
        self.reserved.remove(&base);
        Ok(())
    }

    pub(super) fn create(&mut self, device: usize, bytes: u64, kinds: u32) -> Result<u64, Code> {
        if bytes == 0 || !bytes.is_multiple_of(PAGE) {
            return Err(code::INVALID_VALUE);
        }
        self.take(device, bytes)?;
        let id = self.number();
        let span = Span { device, bytes: vec![0; bytes as usize] };
        let physical = Physical { span, mappings: 0, handles: 0, kinds, identity: None };
        self.physical.insert(id, physical);
        self.new_handle(id)
    }

    fn number(&mut self) -> u64 {
        self.next_handle += 1;
        self.next_handle
    }

    /// One more handle of physical memory.
    fn new_handle(&mut self, id: u64) -> Result<u64, Code> {
        self.physical.get_mut(&id).ok_or(code::INVALID_VALUE)?.handles += 1;
        let handle = self.number();
        self.handles.insert(handle, id);
        Ok(handle)
    }

    /// The physical memory of a handle, to be exported as `kind`.
    fn exported(&mut self, handle: u64, kind: u32) -> Result<(u64, &mut Physical), Code> {
        let id = *self.handles.get(&handle).ok_or(code::INVALID_VALUE)?;
        let physical = self.physical.get_mut(&id).filter(|physical| physical.kinds & kind != 0);
        Ok((id, physical.ok_or(code::INVALID_VALUE)?))
    }

    /// A descriptor that stands for the memory of a handle.
    pub(super) fn export_descriptor(&mut self, handle: u64) -> Result<OwnedFd, Code> {
        let (_, physical) = self.exported(handle, POSIX_FD)?;
        if physical.identity.is_none() {
            physical.identity = Some(std::io::pipe().map_err(|_| code::OPERATING_SYSTEM)?.0);
        }
        let identity = physical.identity.as_ref().ok_or(code::OPERATING_SYSTEM)?;
        Ok(identity.try_clone().map_err(|_| code::OPERATING_SYSTEM)?.into())
    }

    /// The memory that a descriptor stands for.
    pub(super) fn import_descriptor(&mut self, descriptor: BorrowedFd<'_>) -> Result<u64, Code> {
        let wanted = inode(descriptor)?;
        let same = |physical: &Physical| {
            let own = physical.identity.as_ref().map(|identity| inode(identity.as_fd()));
            own == Some(Ok(wanted))
        };
        let found = self.physical.iter().find(|(_, physical)| same(physical));
        let id = *found.ok_or(code::INVALID_VALUE)?.0;
        self.new_handle(id)
    }

    /// The number that stands for the memory of a handle.
    pub(super) fn export_fabric(&mut self, handle: u64) -> Result<u64, Code> {
        Ok(self.exported(handle, FABRIC)?.0)
    }

    pub(super) fn import_fabric(&mut self, number: u64) -> Result<u64, Code> {
        self.new_handle(number)
    }

    /// Whether memory of `cuMemAlloc` begins there.
    pub(super) fn is_direct(&self, addr: u64) -> bool {
        self.direct.contains_key(&addr)
    }

    /// Opens memory of `cuMemAlloc` at another address.
    pub(super) fn open(&mut self, target: u64, device: usize) -> Result<u64, Code> {
        let span = self.direct.get(&target).filter(|span| span.device == device);
        let bytes = span.ok_or(code::INVALID_VALUE)?.bytes.len() as u64;
        let addr = self.addresses(bytes, PAGE);
        self.opened.insert(addr, Opened { target, bytes });
        Ok(addr)
    }

    pub(super) fn close(&mut self, addr: u64) -> Result<(), Code> {
        self.opened.remove(&addr).map(drop).ok_or(code::INVALID_VALUE)
    }

    pub(super) fn release(&mut self, handle: u64) -> Result<(), Code> {
        let id = self.handles.remove(&handle).ok_or(code::INVALID_VALUE)?;
        if let Some(physical) = self.physical.get_mut(&id) {
            physical.handles -= 1;
        }
        self.drop_unused(id);
        Ok(())
    }

    /// Physical memory ends once it is neither held nor mapped.
    fn drop_unused(&mut self, id: u64) {
        let unused = self.physical.get(&id).filter(|p| p.handles == 0 && p.mappings == 0);
        if let Some(physical) = unused {
            let (device, bytes) = (physical.span.device, physical.span.bytes.len() as u64);
            self.devices[device].used -= bytes;
            self.physical.remove(&id);
        }
    }

    pub(super) fn map(&mut self, at: u64, bytes: u64, handle: u64) -> Result<(), Code> {
        let reserved = self.reserved.range(..=at).next_back();
        let inside = reserved.is_some_and(|(base, length)| at + bytes <= base + length);
        let before = self.mapped.range(..at).next_back();
        let overlaps = before.is_some_and(|(start, mapping)| start + mapping.bytes > at)
            || self.mapped.range(at..at + bytes).next().is_some();
        let id = *self.handles.get(&handle).ok_or(code::INVALID_VALUE)?;
        let physical = self.physical.get_mut(&id).ok_or(code::INVALID_VALUE)?;
        let whole = physical.span.bytes.len() as u64 == bytes;
        if !inside || overlaps || !whole || !at.is_multiple_of(PAGE) {
            return Err(code::INVALID_VALUE);
        }
        physical.mappings += 1;
        self.mapped.insert(at, Mapping { bytes, physical: id, access: Vec::new() });
        Ok(())
    }

    /// Start addresses of the mappings that tile a range exactly.
    fn tiles(&self, at: u64, bytes: u64) -> Result<Vec<u64>, Code> {
        let (mut next, mut starts) = (at, Vec::new());
        while next < at + bytes {
            starts.push(next);
            next += self.mapped.get(&next).ok_or(code::INVALID_VALUE)?.bytes;
        }
        if bytes == 0 || next != at + bytes { Err(code::INVALID_VALUE) } else { Ok(starts) }
    }

    pub(super) fn unmap(&mut self, at: u64, bytes: u64) -> Result<(), Code> {
        for start in self.tiles(at, bytes)? {
            let mapping = self.mapped.remove(&start).ok_or(code::INVALID_VALUE)?;
            if let Some(physical) = self.physical.get_mut(&mapping.physical) {
                physical.mappings -= 1;
            }
            self.drop_unused(mapping.physical);
        }
        Ok(())
    }

    /// Lets a device use a range, or takes that back.
    pub(super) fn set_access(
        &mut self,
        at: u64,
        bytes: u64,
        device: usize,
        allowed: bool,
    ) -> Result<(), Code> {
        if device >= self.devices.len() {
            return Err(code::INVALID_DEVICE);
        }
        for start in self.tiles(at, bytes)? {
            let mapping = self.mapped.get_mut(&start).ok_or(code::INVALID_VALUE)?;
            mapping.access.retain(|known| *known != device);
            if allowed {
                mapping.access.push(device);
            }
        }
        Ok(())
    }

    /// The bytes from `addr` to the end of the span or mapping they are in.
    fn bytes_at(&mut self, addr: u64) -> Result<&mut [u8], Code> {
        let addr = match self.opened.range(..=addr).next_back() {
            Some((start, opened)) if addr - start < opened.bytes => opened.target + (addr - start),
            _ => addr,
        };
        let running = self.running.as_ref();
        if let Some((start, mapping)) = self.mapped.range(..=addr).next_back() {
            let offset = addr - start;
            if offset < mapping.bytes {
                let reaches = running.is_none_or(|(device, _)| mapping.access.contains(device));
                if mapping.access.is_empty() || !reaches {
                    return Err(code::INVALID_VALUE);
                }
                let physical = self.physical.get_mut(&mapping.physical);
                return match physical {
                    Some(physical) => Ok(&mut physical.span.bytes[offset as usize..]),
                    None => Err(code::INVALID_VALUE),
                };
            }
        }
        let reaches =
            |home| running.is_none_or(|(device, peers)| *device == home || peers.contains(&home));
        match self.direct.range_mut(..=addr).next_back() {
            Some((start, span))
                if addr - start < span.bytes.len() as u64 && reaches(span.device) =>
            {
                Ok(&mut span.bytes[(addr - start) as usize..])
            }
            _ => Err(code::INVALID_VALUE),
        }
    }

    /// Hands every contiguous piece of a range to `visit`, with its offset in the range.
    pub(super) fn visit(
        &mut self,
        addr: u64,
        bytes: u64,
        mut visit: impl FnMut(usize, &mut [u8]),
    ) -> Result<(), Code> {
        let mut done = 0;
        while done < bytes {
            let piece = self.bytes_at(addr + done)?;
            let length = (piece.len() as u64).min(bytes - done);
            visit(done as usize, &mut piece[..length as usize]);
            done += length;
        }
        Ok(())
    }

    /// The bytes of a range.
    pub(super) fn read(&mut self, addr: u64, bytes: u64) -> Result<Vec<u8>, Code> {
        let mut copy = vec![0; bytes as usize];
        self.visit(addr, bytes, |offset, piece| {
            copy[offset..offset + piece.len()].copy_from_slice(piece);
        })?;
        Ok(copy)
    }

    /// Overwrites a range.
    pub(super) fn write(&mut self, addr: u64, bytes: &[u8]) -> Result<(), Code> {
        self.visit(addr, bytes.len() as u64, |offset, piece| {
            piece.copy_from_slice(&bytes[offset..offset + piece.len()]);
        })
    }
}
