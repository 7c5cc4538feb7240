use super::*;
use crate::error::Refusal;
use crate::steps;
use crate::traces;
use allocator_api2::alloc::{Allocator, Layout};
use allocator_api2::vec::Vec as ArenaVec;
use nix::errno::Errno;

#[test]
fn blocks_do_not_overlap_and_come_back_when_dropped() {
    let arena = Arena::new(1 << 16).unwrap();
    let mut blocks: Vec<Block> = (0..20).map(|i| arena.allocate(i * 100).unwrap()).collect();
    for (i, block) in blocks.iter_mut().enumerate() {
        block.fill(i as u8);
    }
    for (i, block) in blocks.iter().enumerate() {
        assert_eq!(block[..], vec![i as u8; i * 100]);
    }
    let shared: Vec<SharedBlock> = blocks.into_iter().map(Block::share).collect();
    let clones = shared.clone();
    drop(shared);
    assert_eq!((arena.stats().live_blocks, arena.stats().live_bytes), (20, 19_000));
    assert!(clones[7].iter().all(|&byte| byte == 7));
    drop(clones);
    assert_eq!((arena.stats().live_blocks, arena.stats().free_ranges), (0, 1));
}

#[test]
fn a_full_arena_says_what_is_left() {
    let arena = Arena::new(4096).unwrap();
    let _block = arena.allocate(1000).unwrap();
    let full = arena.allocate(4000).unwrap_err();
    let Error::ArenaFull { wanted: 4000, largest, live: 1000, blocks: 1 } = full else {
        panic!("{full}")
    };
    assert_eq!(arena.allocate(largest).unwrap().len() as u64, largest);
    assert!(arena.allocate(largest + 1).is_err());
    assert!(Arena::new(0).unwrap().allocate(0).is_err());
}

#[test]
fn alignment_is_kept_in_the_arena_and_in_memory() {
    let arena = Arena::new(1 << 16).unwrap();
    for align in [1, 2, 64, 128, 4096] {
        let block = arena.allocate_aligned(10, align).unwrap();
        assert!((block.as_ptr().addr() as u64).is_multiple_of(align));
        assert!(block.share().addr().offset.is_multiple_of(align));
    }
}

#[test]
fn receivers_can_read_an_arena_and_nothing_else() {
    let arena = Arena::new(8192).unwrap();
    let fd = arena.as_fd().try_clone_to_owned().unwrap();
    assert!(MapOptions::descriptor(fd).map().is_err(), "the descriptor is read only");
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&arena.as_fd()));
    let writable = std::fs::File::options().read(true).write(true).open(path).unwrap();
    let fd = writable.try_clone().unwrap().into();
    assert!(MapOptions::descriptor(fd).map().is_err(), "no new writable mapping");
    assert!(writable.set_len(0).is_err() && writable.set_len(1 << 20).is_err());
    assert_eq!(nix::unistd::write(&writable, b"x"), Err(Errno::EPERM));

    let mut block = arena.allocate(3).unwrap();
    block.copy_from_slice(b"abc");
    let block = block.share();
    let import = Import::new(writable.into(), 8192).unwrap();
    import.check(block.addr()).unwrap();
    assert_eq!(import.bytes(block.addr()), b"abc");
    let stale = block.addr();
    drop(block);
    let refused = import.check(stale);
    let expected = Refusal::Stale { got: stale.generation, found: 0 };
    assert!(matches!(refused, Err(Error::Refused(r)) if r == expected), "{refused:?}");
}

#[test]
fn collections_live_in_an_arena() {
    let arena = Arena::new(1 << 20).unwrap();
    let mut numbers = ArenaVec::new_in(arena.allocator());
    numbers.extend((0..10_000u64).map(|i| i * i));
    assert!(numbers.iter().enumerate().all(|(i, &n)| n == (i * i) as u64));
    assert_eq!(arena.stats().live_blocks, 1, "what it outgrew is free again");
    drop(numbers);
    assert_eq!(arena.stats().live_blocks, 0);

    let boxed = allocator_api2::boxed::Box::new_in([1u8; 100], arena.allocator());
    assert_eq!((boxed.len(), arena.stats().live_bytes), (100, 100));
    drop(boxed);
    let nothing = arena.allocator().allocate(Layout::new::<()>()).unwrap();
    assert_eq!((nothing.len(), arena.stats().live_blocks), (0, 0));
    let huge = Layout::from_size_align(1 << 21, 8).unwrap();
    assert!(arena.allocator().allocate(huge).is_err());
    let fussy = Layout::from_size_align(64, 8192).unwrap();
    assert!(arena.allocator().allocate(fussy).is_err());
}

#[test]
fn vectors_are_shared_where_they_lie() {
    let arena = Arena::new(1 << 16).unwrap();
    let mut bytes = ArenaVec::with_capacity_in(1000, arena.allocator());
    bytes.extend_from_slice(b"in place");
    let at = bytes.as_ptr();
    let shared = SharedBlock::from_vec(bytes).unwrap();
    assert_eq!((&shared[..], shared.as_ptr()), (&b"in place"[..], at));
    assert_eq!(shared.addr().len, 8);
    drop(shared);
    let empty = SharedBlock::from_vec(ArenaVec::new_in(arena.allocator())).unwrap();
    assert!(empty.is_empty());
    drop(empty);
    assert_eq!(arena.stats().live_blocks, 0);
}

#[test]
fn a_pool_grows_to_its_limit_and_gives_empty_arenas_back() {
    let pool = ArenaPool::new(PoolConfig { arena_bytes: 4096, arenas_max: 3 });
    let big = pool.allocate(10_000).unwrap();
    let mut small: Vec<Block> = (0..4).map(|_| pool.allocate(1500).unwrap()).collect();
    assert_eq!(pool.arenas(), 3);
    let full = pool.allocate(2000);
    assert!(matches!(full, Err(Error::Limit { limit: 3, .. })), "{full:?}");
    assert_eq!(pool.stats().live_bytes, 16_000);
    small.truncate(2);
    drop(big);
    pool.trim();
    assert_eq!(pool.arenas(), 1);
    drop(small);
    pool.trim();
    assert_eq!((pool.arenas(), pool.stats()), (0, ArenaStats::default()));
}

#[test]
fn threads_share_a_pool() {
    let pool = ArenaPool::new(PoolConfig { arena_bytes: 1 << 16, arenas_max: 8 });
    std::thread::scope(|scope| {
        for thread in 0..4u8 {
            let pool = &pool;
            scope.spawn(move || {
                let mut kept = Vec::new();
                for i in 0..300 {
                    let mut block = pool.allocate(i % 700).unwrap();
                    block.fill(thread);
                    kept.push(block);
                    kept.truncate(20);
                    assert!(kept.iter().all(|b| b.iter().all(|&byte| byte == thread)));
                }
            });
        }
    });
    assert_eq!(pool.stats().live_blocks, 0);
}

#[test]
fn a_failure_at_any_step_of_making_an_arena_leaves_nothing() {
    let label = "arena-of-this-test";
    for n in 0.. {
        let mut left = n;
        steps::on_step(move |_| {
            left -= 1;
            if left == -1 { Err(Errno::EIO) } else { Ok(()) }
        });
        let result = Arena::labelled(5000, label);
        steps::clear();
        let done = result.is_ok();
        assert_eq!(traces::own(label), if done { (1, 1) } else { (0, 0) }, "step {n}");
        drop(result);
        if done {
            assert_eq!(traces::own(label), (0, 0));
            return assert!(n >= 6, "too few steps: {n}");
        }
    }
}
