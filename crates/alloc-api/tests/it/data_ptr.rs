//! Data pointers: what is released, when, how often, and by whom.

use alloc_api::{DataPtr, Deleter, Device, Dropping, LocalDataPtr};
use alloc_core::Addr;
use parking_lot::Mutex;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Arc;

type Log = Arc<Mutex<Vec<String>>>;

/// A context that says which deleter got it.
struct Noted(Log, &'static str);

struct First;
struct Second;

impl Deleter for First {
    type Context = Noted;
    fn release(Noted(log, name): Noted) {
        log.lock().push(format!("first {name}"));
    }
}

impl Deleter for Second {
    type Context = Noted;
    fn release(Noted(log, name): Noted) {
        log.lock().push(format!("second {name}"));
    }
    fn raw_addr(_: &Noted) -> Option<Addr> {
        Some(HERE)
    }
}

const HERE: Addr = Addr::new(0x1000);

fn noted(log: &Log, data: Addr) -> DataPtr {
    DataPtr::with_context::<First>(data, Noted(log.clone(), "a"), Device::cuda(1))
}

#[track_caller]
fn expect(log: &Log, lines: &[&str]) {
    assert_eq!(std::mem::take(&mut *log.lock()), lines);
}

#[test]
fn the_default_is_null_on_the_cpu() {
    let null = DataPtr::default();
    assert!(null.is_null() && !null.is_owner() && null.is_simple());
    assert_eq!(null.device(), Device::CPU);
}

#[test]
fn null_keeps_its_device() {
    let mut null = DataPtr::null(Device::cuda(3));
    null.clear();
    assert_eq!(null.take().device(), Device::cuda(3));
    assert_eq!(null.device(), Device::cuda(3));
    null.set_device(Device::CPU);
    assert_eq!(null.device(), Device::CPU);
}

#[test]
fn what_is_borrowed_is_not_released_and_not_null() {
    let borrowed = DataPtr::borrowed(HERE, Device::CPU);
    assert!(!borrowed.is_null() && !borrowed.is_owner() && !borrowed.is_simple());
}

#[test]
fn the_owner_is_released_whatever_the_address_is() {
    let log = Log::default();
    for data in [HERE, Addr::NULL, HERE + 64] {
        let pointer = noted(&log, data);
        assert!(!pointer.is_null(), "null data with an owner is not null");
        drop(pointer);
        expect(&log, &["first a"]);
    }
}

#[test]
fn clear_releases_once_and_keeps_the_device() {
    let log = Log::default();
    let mut pointer = noted(&log, HERE);
    pointer.clear();
    expect(&log, &["first a"]);
    assert!(pointer.is_null());
    assert_eq!(pointer.device(), Device::cuda(1));
    pointer.clear();
    drop(pointer);
    expect(&log, &[]);
}

#[test]
fn assignment_releases_the_old_owner_after_the_new_one_is_made() {
    let log = Log::default();
    let mut pointer = noted(&log, HERE);
    pointer = DataPtr::with_context::<Second>(HERE, Noted(log.clone(), "b"), pointer.device());
    expect(&log, &["first a"]);
    drop(pointer);
    expect(&log, &["second b"]);
}

#[test]
fn taking_leaves_null_behind() {
    let log = Log::default();
    let mut pointer = noted(&log, HERE);
    let taken = pointer.take();
    assert!(pointer.is_null());
    drop(pointer);
    expect(&log, &[]);
    assert_eq!(taken.get(), HERE);
    drop(taken);
    expect(&log, &["first a"]);
}

#[test]
fn the_owner_can_move_out_and_the_address_stays() {
    let log = Log::default();
    let mut pointer = noted(&log, HERE);
    let owner = pointer.take_owner();
    assert_eq!(pointer.get(), HERE);
    assert!(!pointer.is_owner() && owner.is_owner());
    drop(pointer);
    expect(&log, &[]);
    drop(owner);
    expect(&log, &["first a"]);
}

#[test]
fn the_context_moves_out_to_its_own_type_only_and_then_no_deleter_runs() {
    let log = Log::default();
    let mut pointer = noted(&log, HERE);
    assert!(pointer.take_context::<Second>().is_none());
    assert!(pointer.is_owner(), "the wrong type takes nothing");
    let context = pointer.take_context::<First>().unwrap();
    assert_eq!(pointer.get(), HERE);
    assert!(!pointer.is_owner());
    drop((pointer, context));
    expect(&log, &[]);
}

#[test]
fn the_deleter_is_the_type_tag() {
    let log = Log::default();
    let mut pointer = noted(&log, HERE);
    assert!(pointer.has_deleter::<First>() && !pointer.has_deleter::<Second>());
    assert!(pointer.cast_context::<Second>().is_none());
    assert!(pointer.cast_context::<Dropping<Noted>>().is_none());
    assert_eq!(pointer.cast_context::<First>().unwrap().1, "a");
    pointer.cast_context_mut::<First>().unwrap().1 = "z";
    assert!(pointer.cast_context_mut::<Second>().is_none());
    drop(pointer);
    expect(&log, &["first z"]);
    assert!(!DataPtr::default().has_deleter::<First>());
}

#[test]
fn a_deleter_is_exchanged_if_it_is_the_expected_one() {
    let log = Log::default();
    let mut pointer = noted(&log, HERE);
    assert!(!pointer.is_simple());
    assert!(!pointer.compare_exchange_deleter::<Second, First>());
    assert!(pointer.compare_exchange_deleter::<First, Second>());
    assert!(!pointer.compare_exchange_deleter::<First, Second>());
    assert!(pointer.is_simple(), "simple by the new deleter's rule");
    expect(&log, &[]);
    drop(pointer);
    expect(&log, &["second a"]);
    assert!(!DataPtr::default().compare_exchange_deleter::<First, Second>());
}

#[test]
fn simple_means_that_the_address_can_stand_for_the_owner() {
    let log = Log::default();
    let with = |data| DataPtr::with_context::<Second>(data, Noted(log.clone(), "a"), Device::CPU);
    assert!(with(HERE).is_simple());
    assert!(!with(HERE + 1).is_simple());
    assert!(!with(Addr::NULL).is_simple());
    expect(&log, &["second a"; 3]);

    assert_eq!(with(HERE).into_addr().unwrap(), HERE);
    expect(&log, &[]);
    let refused = with(HERE + 1).into_addr().unwrap_err();
    assert!(refused.to_string().contains("0x1001"), "{refused}");
    assert!(refused.0.is_owner());
    drop(refused);
    expect(&log, &["second a"]);
    assert_eq!(DataPtr::null(Device::CPU).into_addr().unwrap(), Addr::NULL);
    assert!(DataPtr::borrowed(HERE, Device::CPU).into_addr().is_err());
    assert!(noted(&log, HERE).into_addr().unwrap_err().to_string().contains("no address"));
}

#[test]
fn any_value_can_own_memory() {
    let value = Arc::new(());
    let pointer = DataPtr::owned(HERE, value.clone(), Device::CPU);
    assert!(pointer.cast_context::<Dropping<Arc<()>>>().is_some());
    assert_eq!(Arc::strong_count(&value), 2);
    drop(pointer);
    assert_eq!(Arc::strong_count(&value), 1);
}

#[test]
fn pointers_go_to_other_threads_and_local_ones_stay() {
    let log = Log::default();
    let pointer = noted(&log, HERE);
    std::thread::spawn(move || drop(pointer)).join().unwrap();
    expect(&log, &["first a"]);

    let value = Rc::new(());
    let local = LocalDataPtr::owned_locally(HERE, value.clone(), Device::CPU);
    assert_eq!(Rc::strong_count(&value), 2);
    drop(local);
    assert_eq!(Rc::strong_count(&value), 1);
    drop(noted(&log, HERE).into_local());
    expect(&log, &["first a"]);
}

struct Panics;

impl Deleter for Panics {
    type Context = Arc<()>;
    fn release(_: Arc<()>) {
        panic!("the deleter fails");
    }
}

#[test]
fn a_deleter_that_panics_has_run() {
    let value = Arc::new(());
    let mut pointer = DataPtr::with_context::<Panics>(HERE, value.clone(), Device::CPU);
    let cleared = catch_unwind(AssertUnwindSafe(|| pointer.clear()));
    assert!(cleared.is_err());
    assert!(pointer.is_null(), "nothing is left to release a second time");
    assert_eq!(Arc::strong_count(&value), 1, "the context went with the panic");
    drop(pointer);
}

#[test]
fn owners_are_released_when_a_panic_unwinds_past_them() {
    let log = Log::default();
    let unwound = catch_unwind(AssertUnwindSafe(|| {
        let _pointer = noted(&log, HERE);
        panic!("elsewhere");
    }));
    assert!(unwound.is_err());
    expect(&log, &["first a"]);
}

thread_local! {
    static ORDER: RefCell<Vec<u32>> = const { RefCell::new(Vec::new()) };
}

struct InOrder(u32);

impl Drop for InOrder {
    fn drop(&mut self) {
        ORDER.with_borrow_mut(|order| order.push(self.0));
    }
}

#[test]
fn owners_go_in_the_usual_order_and_nested_ones_from_the_outside_in() {
    let inner = DataPtr::owned(HERE, InOrder(1), Device::CPU);
    // A pointer that owns another, as wrappers of allocators do.
    let outer = DataPtr::owned(HERE, (InOrder(0), inner), Device::CPU);
    let fields = vec![outer, DataPtr::owned(HERE, InOrder(2), Device::CPU)];
    drop(fields);
    assert_eq!(ORDER.take(), [0, 1, 2]);
}
