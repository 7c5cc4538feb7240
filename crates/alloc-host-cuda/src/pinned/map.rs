//! Anonymous memory from the system: aligned for huge pages, on a NUMA node.

use crate::error::PinError;
use std::ffi::c_void;

/// Huge pages are of this size, and start at multiples of it.
const HUGE_PAGE: usize = 2 << 20;

/// Memory of the process's own, given back when dropped.
#[derive(Debug)]
pub(super) struct Mapping {
    start: usize,
    bytes: usize,
}

impl Mapping {
    /// Maps `bytes`, a multiple of the page size. From the size of a huge page on it starts at a
    /// multiple of that, and huge pages are asked for. What becomes of `node` and of huge pages is
    /// up to the system: memory on another node is better than none.
    pub(super) fn new<E>(
        bytes: usize,
        node: Option<u32>,
        huge_pages: bool,
    ) -> Result<Mapping, PinError<E>> {
        let align = if huge_pages && bytes >= HUGE_PAGE { HUGE_PAGE } else { 1 };
        let room = bytes + align - 1;
        let start = map(room)?;
        let aligned = start.next_multiple_of(align);
        // What alignment left over goes back.
        unmap(start, aligned - start);
        let end = (start + room).next_multiple_of(page_bytes());
        let rest = (aligned + bytes).next_multiple_of(page_bytes());
        unmap(rest, end - rest);
        let mapping = Mapping { start: aligned, bytes };
        if let Some(node) = node {
            mapping.prefer(node);
        }
        if align > 1 {
            // SAFETY: advice about memory of our own.
            unsafe { libc::madvise(mapping.place(), bytes, libc::MADV_HUGEPAGE) };
        }
        Ok(mapping)
    }

    pub(super) fn start(&self) -> usize {
        self.start
    }

    /// Gives up ownership: whoever has the address must [`unmap`] it.
    pub(super) fn into_start(self) -> usize {
        let start = self.start;
        std::mem::forget(self);
        start
    }

    fn place(&self) -> *mut c_void {
        std::ptr::with_exposed_provenance_mut(self.start)
    }

    /// Pages touched from now on come from this node if it has any.
    fn prefer(&self, node: u32) {
        const NODES_MAX: usize = 1024;
        let mut mask = [0_u64; NODES_MAX / 64];
        let Some(word) = mask.get_mut(node as usize / 64) else { return };
        *word = 1 << (node % 64);
        // SAFETY: concerns memory of our own; the mask has the stated number of bits.
        unsafe {
            libc::syscall(
                libc::SYS_mbind,
                self.place(),
                self.bytes,
                libc::MPOL_PREFERRED,
                mask.as_ptr(),
                NODES_MAX,
                0,
            )
        };
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        unmap(self.start, self.bytes);
    }
}

fn map<E>(bytes: usize) -> Result<usize, PinError<E>> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    // SAFETY: asks for new memory, wherever the system wants.
    let place = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
    if place == libc::MAP_FAILED {
        return Err(PinError::last("mmap"));
    }
    Ok(place.expose_provenance())
}

/// Gives mapped memory back that nothing uses any more. Fails only for arguments that were never
/// mapped so.
pub(super) fn unmap(start: usize, bytes: usize) {
    if bytes > 0 {
        // SAFETY: callers own the range, and give it up with this call.
        unsafe { libc::munmap(std::ptr::with_exposed_provenance_mut(start), bytes) };
    }
}

/// The system's page size.
pub(super) fn page_bytes() -> usize {
    // SAFETY: asks for a constant.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).ok().filter(|bytes| bytes.is_power_of_two()).unwrap_or(4096)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapped(bytes: usize, huge: bool) -> Mapping {
        Mapping::new::<()>(bytes, None, huge).expect("memory")
    }

    #[test]
    fn large_mappings_are_aligned_for_huge_pages() {
        for _ in 0..4 {
            assert!(mapped(6 << 20, true).start().is_multiple_of(HUGE_PAGE));
            assert!(mapped(3 * page_bytes(), true).start().is_multiple_of(page_bytes()));
        }
    }

    #[test]
    fn a_mapping_is_usable_to_its_end_and_gone_when_dropped() {
        let bytes = (2 << 20) + page_bytes();
        let mapping = mapped(bytes, true);
        let last = std::ptr::with_exposed_provenance_mut::<u8>(mapping.start() + bytes - 1);
        // SAFETY: inside the mapping, which nobody else uses.
        unsafe { last.write_volatile(7) };
        // SAFETY: as above.
        assert_eq!(unsafe { last.read_volatile() }, 7);
        let start = mapping.start();
        drop(mapping);
        let mut resident = vec![0_u8; bytes / page_bytes()];
        let place = std::ptr::with_exposed_provenance_mut(start);
        // SAFETY: only asks; the vector has room for one byte a page.
        let asked = unsafe { libc::mincore(place, bytes, resident.as_mut_ptr()) };
        assert_eq!(asked, -1, "nothing is mapped there");
    }

    #[test]
    fn a_preferred_node_is_no_condition() {
        let mapping = Mapping::new::<()>(page_bytes(), Some(0), false).expect("memory");
        mapping.prefer(u32::MAX);
    }
}
