//! First touch by several threads: the system makes pages one by one, as they are first written.

use super::map::page_bytes;
use parking_lot::{Condvar, Mutex};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;

/// Threads that touch memory. They start when first needed and live as long as the pool.
#[derive(Debug, Default)]
pub(crate) struct TouchPool {
    workers: Mutex<Vec<Worker>>,
}

#[derive(Debug)]
struct Worker {
    /// `None` only while being dropped.
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

struct Job {
    share: Share,
    done: Arc<Latch>,
}

/// Whole pages of memory that nobody else uses yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Share {
    start: usize,
    bytes: usize,
}

/// Counts jobs down.
#[derive(Debug)]
struct Latch {
    left: Mutex<usize>,
    zero: Condvar,
}

impl TouchPool {
    /// Makes all pages of a range exist, with `threads` threads, the calling one among them. The
    /// range is whole pages; it must be mapped, and nobody else may use it during the call.
    ///
    /// # Safety
    /// The above.
    pub(super) unsafe fn touch(&self, start: usize, bytes: usize, threads: usize) {
        let shares = shares(start, bytes, threads.max(1), page_bytes());
        let latch = Arc::new(Latch { left: Mutex::new(0), zero: Condvar::new() });
        let (own, others) = match shares.split_first() {
            Some((own, others)) => (*own, others),
            None => return,
        };
        self.hand_out(others, &latch);
        touch_share(own);
        latch.wait();
    }

    fn hand_out(&self, shares: &[Share], latch: &Arc<Latch>) {
        let mut workers = self.workers.lock();
        while workers.len() < shares.len() {
            let Some(worker) = Worker::start() else { break };
            workers.push(worker);
        }
        *latch.left.lock() = shares.len();
        for (at, &share) in shares.iter().enumerate() {
            let job = Job { share, done: latch.clone() };
            // With fewer threads than shares some threads get several; without any, this one does all.
            let refused = match workers.get(at % workers.len().max(1)) {
                Some(worker) => worker.jobs.as_ref().is_none_or(|jobs| jobs.send(job).is_err()),
                None => true,
            };
            if refused {
                touch_share(share);
                latch.count_down();
            }
        }
    }
}

impl Worker {
    fn start() -> Option<Worker> {
        let (jobs, queue) = channel();
        let builder = std::thread::Builder::new().name("pin-touch".to_owned());
        let thread = builder.spawn(move || work(&queue)).ok()?;
        Some(Worker { jobs: Some(jobs), thread: Some(thread) })
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // Its jobs cannot panic.
            let _ = thread.join();
        }
    }
}

fn work(queue: &Receiver<Job>) {
    for job in queue {
        touch_share(job.share);
        job.done.count_down();
    }
}

impl Latch {
    fn count_down(&self) {
        let mut left = self.left.lock();
        *left -= 1;
        if *left == 0 {
            self.zero.notify_all();
        }
    }

    fn wait(&self) {
        let mut left = self.left.lock();
        while *left > 0 {
            self.zero.wait(&mut left);
        }
    }
}

/// Cuts a range into as equal shares as whole pages allow; none is empty.
fn shares(start: usize, bytes: usize, count: usize, page: usize) -> Vec<Share> {
    let share = bytes.div_ceil(count).next_multiple_of(page);
    (0..count)
        .map(|at| at * share)
        .take_while(|&offset| offset < bytes)
        .map(|offset| Share { start: start + offset, bytes: share.min(bytes - offset) })
        .collect()
}

/// Makes the pages of a share exist: in one call where the system has it, else by writing to each.
fn touch_share(share: Share) {
    let place = std::ptr::with_exposed_provenance_mut::<u8>(share.start);
    // SAFETY: concerns a mapped range that is ours alone.
    let result = unsafe { libc::madvise(place.cast(), share.bytes, libc::MADV_POPULATE_WRITE) };
    if result == 0 {
        return;
    }
    for offset in (0..share.bytes).step_by(page_bytes()) {
        // SAFETY: stays inside the share.
        let page = unsafe { place.add(offset) };
        // SAFETY: mapped memory that nobody else uses; new pages are zero anyway.
        unsafe { page.write_volatile(0) };
    }
}

#[cfg(test)]
mod tests {
    use super::super::map::Mapping;
    use super::*;

    #[test]
    fn shares_cover_the_range_exactly() {
        for (bytes, count) in [(1, 1), (1, 16), (16, 16), (17, 16), (1000, 7), (5, 128)] {
            let shares = shares(1 << 20, bytes * 4096, count, 4096);
            let mut at = 1 << 20;
            for share in &shares {
                assert_eq!(share.start, at);
                assert!(share.bytes > 0 && share.bytes.is_multiple_of(4096));
                at += share.bytes;
            }
            assert_eq!(at, (1 << 20) + bytes * 4096);
            assert!(shares.len() <= count);
        }
    }

    fn resident_pages(mapping: &Mapping, bytes: usize) -> usize {
        let mut resident = vec![0_u8; bytes / page_bytes()];
        let place = std::ptr::with_exposed_provenance_mut(mapping.start());
        // SAFETY: only asks; the vector has room for one byte a page.
        assert_eq!(unsafe { libc::mincore(place, bytes, resident.as_mut_ptr()) }, 0);
        resident.iter().filter(|page| **page & 1 == 1).count()
    }

    #[test]
    fn every_page_exists_afterwards() {
        let pool = TouchPool::default();
        for threads in [1, 3, 8] {
            let bytes = 600 * page_bytes();
            let mapping = Mapping::new::<()>(bytes, None, false).expect("memory");
            assert_eq!(resident_pages(&mapping, bytes), 0);
            // SAFETY: whole pages of a mapping that only this test uses.
            unsafe { pool.touch(mapping.start(), bytes, threads) };
            assert_eq!(resident_pages(&mapping, bytes), 600);
        }
        assert!(pool.workers.lock().len() <= 7, "threads are used again");
    }

    #[test]
    fn several_threads_may_touch_at_once() {
        let pool = TouchPool::default();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let bytes = 64 * page_bytes();
                    let mapping = Mapping::new::<()>(bytes, None, false).expect("memory");
                    // SAFETY: whole pages of a mapping that only this thread uses.
                    unsafe { pool.touch(mapping.start(), bytes, 4) };
                    assert_eq!(resident_pages(&mapping, bytes), 64);
                });
            }
        });
    }
}
