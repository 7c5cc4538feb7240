//! Pages of the system: huge ones, and those of a NUMA node.

use crate::config::Plan;
use crate::error::CpuError;
use std::io::Error;
use std::ptr::NonNull;

/// Highest number of a NUMA node, and one.
const NODES_MAX: usize = 1024;

/// Maps whole pages, aligned as planned.
pub(super) fn map(plan: &Plan, huge: bool, node: Option<u16>) -> Result<NonNull<u8>, CpuError> {
    let (total, align) = (plan.total as usize, plan.align as usize);
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let room = total + align;
    // SAFETY: asks for new memory, wherever the system wants.
    let place = unsafe { libc::mmap(std::ptr::null_mut(), room, protection, flags, -1, 0) };
    if place == libc::MAP_FAILED {
        return Err(CpuError::OutOfMemory { bytes: plan.bytes, errno: errno() });
    }
    let first = place.cast::<u8>();
    // What alignment left over goes back. All parts are whole pages.
    let skipped = first.align_offset(align);
    let base = first.wrapping_add(skipped);
    unmap(first, skipped);
    unmap(base.wrapping_add(total), room - skipped - total);
    if let Some(node) = node
        && let Err(errno) = bind(base, total, node)
    {
        unmap(base, total);
        return Err(CpuError::Numa { node, errno });
    }
    if huge {
        // The system may have none, or be told not to give any; then they are ordinary pages.
        // SAFETY: advice about memory of our own.
        unsafe { libc::madvise(base.cast(), total, libc::MADV_HUGEPAGE) };
    }
    NonNull::new(base).ok_or(CpuError::OutOfMemory { bytes: plan.bytes, errno: libc::ENOMEM })
}

/// Gives mapped pages back that nothing uses any more.
pub(super) fn unmap(start: *mut u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: callers own the range, and give it up with this call.
        unsafe { libc::munmap(start.cast(), bytes) };
    }
}

/// Pages touched from now on come from this node only.
fn bind(start: *mut u8, bytes: usize, node: u16) -> Result<(), i32> {
    let mut mask = [0_u64; NODES_MAX / 64];
    let word = mask.get_mut(usize::from(node) / 64).ok_or(libc::EINVAL)?;
    *word = 1 << (node % 64);
    // SAFETY: concerns memory of our own; the mask has the stated number of bits.
    let result = unsafe {
        libc::syscall(libc::SYS_mbind, start, bytes, libc::MPOL_BIND, mask.as_ptr(), NODES_MAX, 0)
    };
    if result == 0 { Ok(()) } else { Err(errno()) }
}

fn errno() -> i32 {
    Error::last_os_error().raw_os_error().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aligned::{Memory, page_bytes};
    use crate::config::CpuConfig;

    /// Whether pages are mapped at an address.
    fn is_mapped(addr: u64, bytes: u64) -> bool {
        let mut resident = vec![0_u8; bytes.div_ceil(page_bytes()) as usize];
        let place = std::ptr::with_exposed_provenance_mut(addr as usize);
        // SAFETY: only asks; the vector has room for one byte a page.
        unsafe { libc::mincore(place, bytes as usize, resident.as_mut_ptr()) == 0 }
    }

    fn memory(config: CpuConfig, bytes: u64) -> Result<Memory, CpuError> {
        Memory::new(Plan::new(&config, page_bytes(), bytes, 1)?, &config)
    }

    #[test]
    fn huge_pages_are_aligned_usable_to_the_end_and_given_back() {
        let config = CpuConfig { huge_pages: true, ..CpuConfig::default() };
        let bytes = (4 << 20) + 100;
        let mut taken = memory(config, bytes).unwrap();
        let addr = taken.addr();
        assert!(addr.is_aligned(2 << 20));
        taken.bytes_mut().last_mut().unwrap().write(7);
        assert!(is_mapped(addr.get(), bytes));
        drop(taken);
        assert!(!is_mapped(addr.get(), bytes));
    }

    #[test]
    fn memory_of_a_node_is_from_that_node_or_an_error_that_names_it() {
        let config = CpuConfig { numa_node: Some(0), ..CpuConfig::default() };
        match memory(config, 100) {
            Ok(mut taken) => {
                taken.bytes_mut()[0].write(1);
                let mut node = -1_i32;
                const OF_ADDRESS: usize = 1 | 2; // MPOL_F_NODE | MPOL_F_ADDR
                let (none, place) = (std::ptr::null_mut::<u64>(), taken.addr().get());
                // SAFETY: asks about a mapped address; the place for the result is valid.
                let asked = unsafe {
                    libc::syscall(libc::SYS_get_mempolicy, &mut node, none, 0, place, OF_ADDRESS)
                };
                assert_eq!((asked, node), (0, 0));
            }
            // Containers may forbid it.
            Err(CpuError::Numa { node: 0, errno: libc::EPERM | libc::ENOSYS }) => {}
            Err(other) => panic!("{other}"),
        }
        for node in [1023, 1024, u16::MAX] {
            let config = CpuConfig { numa_node: Some(node), ..CpuConfig::default() };
            let refused = memory(config, 100).err();
            assert!(matches!(refused, Some(CpuError::Numa { node: n, .. }) if n == node));
        }
    }

    #[test]
    fn what_no_address_space_holds_is_out_of_memory_with_the_size() {
        for huge_pages in [false, true] {
            let config = CpuConfig { huge_pages, ..CpuConfig::default() };
            let bytes = 1 << 61;
            let refused = memory(config, bytes).err();
            assert_eq!(refused, Some(CpuError::OutOfMemory { bytes, errno: libc::ENOMEM }));
        }
    }
}
