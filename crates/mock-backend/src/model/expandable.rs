//! Expandable segments: reserved ranges that are mapped page by page.

use super::ModelAction;
use super::device::{DeviceModel, Request};
use super::driver::Driver;
use crate::SpanKind;

/// Page size of the small class.
const SMALL_PAGE: u64 = 2 << 20;

impl DeviceModel {
    /// Maps pages until a free block is large enough; its address. Pages that were mapped stay
    /// mapped if a later step fails.
    pub(super) fn new_expandable_block(
        &mut self,
        driver: &mut Driver,
        request: &Request,
    ) -> Option<u64> {
        let needed = request.rounded;
        let mut addr = self.find_growable(driver, request)?;
        let first = &self.blocks[self.index(addr)];
        if !first.mapped {
            let bytes = first.bytes.min(needed);
            addr = self.map(driver, addr, bytes)?;
        }
        loop {
            let at = self.index(addr);
            let have = self.blocks[at].bytes;
            if have >= needed {
                return Some(addr);
            }
            let next = &self.blocks[self.neighbours(at).1?];
            let bytes = next.bytes.min(needed - have);
            addr = self.map(driver, next.addr, bytes)?;
        }
    }

    /// Where to start: the lowest hole that, with idle neighbours, offers enough addresses. A new
    /// segment if there is none; `None` if no segment could ever offer enough.
    fn find_growable(&mut self, driver: &mut Driver, request: &Request) -> Option<u64> {
        for at in 0..self.blocks.len() {
            let hole = &self.blocks[at];
            let mine = (hole.small, hole.stream, hole.pool);
            if hole.mapped || mine != (request.small, request.stream, request.pool) {
                continue;
            }
            let before = self.neighbours(at).0.filter(|&b| self.blocks[b].is_idle());
            let start = before.unwrap_or(at);
            let run = self.blocks[start..]
                .iter()
                .take_while(|b| b.segment == hole.segment && b.is_idle())
                .map(|b| b.bytes);
            if run.sum::<u64>() >= request.rounded {
                return Some(self.blocks[start].addr);
            }
        }
        let page = if request.small { SMALL_PAGE } else { driver.conf.large_segment };
        let bytes = driver.reservation_bytes(self.id, page);
        if bytes < request.rounded {
            return None;
        }
        let base = driver.address(SpanKind::Reservation, bytes).get();
        self.add_segment(request, base, bytes, Some((base, page)));
        Some(base)
    }

    /// Maps the first `bytes` of a hole, rounded up to pages; the free block that they are part of
    /// then. All or nothing.
    fn map(&mut self, driver: &mut Driver, addr: u64, bytes: u64) -> Option<u64> {
        let at = self.index(addr);
        let hole = &self.blocks[at];
        let (_, page) = hole.pages?;
        let (small, stream) = (hole.small, hole.stream);
        let bytes = bytes.next_multiple_of(page);
        for done in 0..bytes / page {
            if !driver.take(self.id, page) {
                driver.put_back(self.id, done * page);
                return None;
            }
        }
        if bytes < self.blocks[at].bytes {
            self.cut(at, bytes);
        }
        self.blocks[at].mapped = true;
        let (at, _) = self.merge(at);
        self.stamp(at);
        self.total += bytes;
        self.stats.reserved_bytes.up(small, bytes);
        self.stats.num_device_alloc += 1;
        self.trace(driver, ModelAction::SegmentMap, (addr, bytes), stream);
        Some(self.blocks[at].addr)
    }

    /// Unmaps the pages that lie wholly in a free block. The segment goes when its last page went.
    pub(super) fn unmap(&mut self, driver: &mut Driver, addr: u64) {
        let mut at = self.index(addr);
        let block = &self.blocks[at];
        let Some((base, page)) = block.pages else {
            return;
        };
        let (small, stream) = (block.small, block.stream);
        let from = base + (block.addr - base).next_multiple_of(page);
        let to = base + (block.end() - base) / page * page;
        if from >= to {
            return;
        }
        // Up to three parts: free head, unmapped middle, free tail.
        if to < block.end() {
            let bytes = to - block.addr;
            self.cut(at, bytes);
            self.stamp(at + 1);
        }
        if from > addr {
            self.cut(at, from - addr);
            self.stamp(at);
            at += 1;
        }
        let bytes = to - from;
        driver.finish(stream);
        driver.put_back(self.id, bytes);
        self.total -= bytes;
        self.stats.reserved_bytes.down(small, bytes);
        self.stats.num_device_free += 1;
        self.trace(driver, ModelAction::SegmentUnmap, (from, bytes), stream);
        self.blocks[at].mapped = false;
        let (at, _) = self.merge(at);
        if !self.is_split(at) {
            self.blocks.remove(at);
        }
    }
}
