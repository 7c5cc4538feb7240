//! Device memory of the imitation: spans of bytes at made-up addresses, direct or mapped.

use crate::error::code;
use std::collections::BTreeMap;

/// A result code as an error.
pub(super) type Code = u32;

/// The driver's unit: sizes round up to it, addresses and physical memory are multiples of it.
pub(super) const PAGE: u64 = 2 << 20;

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
    released: bool,
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
        self.direct.len() + self.reserved.len() + self.physical.len() + self.mapped.len()
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

    pub(super) fn create(&mut self, device: usize, bytes: u64) -> Result<u64, Code> {
        if bytes == 0 || !bytes.is_multiple_of(PAGE) {
            return Err(code::INVALID_VALUE);
        }
        self.take(device, bytes)?;
        let handle = self.next_handle;
        self.next_handle += 1;
        let span = Span { device, bytes: vec![0; bytes as usize] };
        self.physical.insert(handle, Physical { span, mappings: 0, released: false });
        Ok(handle)
    }

    pub(super) fn release(&mut self, handle: u64) -> Result<(), Code> {
        let physical = self.physical.get_mut(&handle).ok_or(code::INVALID_VALUE)?;
        if physical.released {
            return Err(code::INVALID_VALUE);
        }
        physical.released = true;
        self.drop_unused(handle);
        Ok(())
    }

    /// Physical memory ends once it is neither held nor mapped.
    fn drop_unused(&mut self, handle: u64) {
        let unused = self.physical.get(&handle).filter(|p| p.released && p.mappings == 0);
        if let Some(physical) = unused {
            let (device, bytes) = (physical.span.device, physical.span.bytes.len() as u64);
            self.devices[device].used -= bytes;
            self.physical.remove(&handle);
        }
    }

    pub(super) fn map(&mut self, at: u64, bytes: u64, handle: u64) -> Result<(), Code> {
        let reserved = self.reserved.range(..=at).next_back();
        let inside = reserved.is_some_and(|(base, length)| at + bytes <= base + length);
        let before = self.mapped.range(..at).next_back();
        let overlaps = before.is_some_and(|(start, mapping)| start + mapping.bytes > at)
            || self.mapped.range(at..at + bytes).next().is_some();
        let physical = self.physical.get_mut(&handle).ok_or(code::INVALID_VALUE)?;
        let whole = physical.span.bytes.len() as u64 == bytes && !physical.released;
        if !inside || overlaps || !whole || !at.is_multiple_of(PAGE) {
            return Err(code::INVALID_VALUE);
        }
        physical.mappings += 1;
        self.mapped.insert(at, Mapping { bytes, physical: handle, access: Vec::new() });
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

    pub(super) fn set_access(&mut self, at: u64, bytes: u64, device: usize) -> Result<(), Code> {
        if device >= self.devices.len() {
            return Err(code::INVALID_DEVICE);
        }
        for start in self.tiles(at, bytes)? {
            let mapping = self.mapped.get_mut(&start).ok_or(code::INVALID_VALUE)?;
            mapping.access.push(device);
        }
        Ok(())
    }

    /// The bytes from `addr` to the end of the span or mapping they are in.
    fn bytes_at(&mut self, addr: u64) -> Result<&mut [u8], Code> {
        if let Some((start, mapping)) = self.mapped.range(..=addr).next_back() {
            let offset = addr - start;
            if offset < mapping.bytes {
                if mapping.access.is_empty() {
                    return Err(code::INVALID_VALUE);
                }
                let physical = self.physical.get_mut(&mapping.physical);
                return match physical {
                    Some(physical) => Ok(&mut physical.span.bytes[offset as usize..]),
                    None => Err(code::INVALID_VALUE),
                };
            }
        }
        match self.direct.range_mut(..=addr).next_back() {
            Some((start, span)) if addr - start < span.bytes.len() as u64 => {
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
