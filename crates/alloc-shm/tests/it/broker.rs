//! Brokers: in a thread, in a process, full, and killed.

use alloc_shm::broker::{Broker, BrokerClient, BrokerStats, Lifetime, Limits, Reason, ThingKind};
use alloc_shm::{Arena, Draft, Error, Frozen, MapOptions, SocketAddress};
use std::io::{BufRead, BufReader};
use std::os::fd::AsFd;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

fn address() -> SocketAddress {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let (pid, n) = (std::process::id(), COUNTER.fetch_add(1, Ordering::Relaxed));
    SocketAddress::Abstract(format!("alloc-shm-broker-{pid}-{n}"))
}

fn frozen(bytes: &[u8]) -> Frozen {
    let mut draft = Draft::new(bytes.len() as u64).unwrap();
    draft.copy_from_slice(bytes);
    draft.freeze().unwrap()
}

fn reason<T: std::fmt::Debug>(result: alloc_shm::Result<T>) -> Reason {
    match result {
        Err(Error::Broker { reason, .. }) => reason,
        other => panic!("not a refusal: {other:?}"),
    }
}

/// Waits until the broker has heard of what its clients did without asking.
fn until(client: &BrokerClient, things: u64, holds: u64) {
    until_it_has(client, |stats| (stats.things, stats.holds) == (things, holds));
}

fn until_it_has(client: &BrokerClient, it_has: impl Fn(BrokerStats) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let stats = client.stats().unwrap();
        if it_has(stats) {
            return;
        }
        assert!(Instant::now() < deadline, "{stats:?}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn things_outlive_who_put_them_as_long_as_they_are_held_or_kept() {
    let address = address();
    let broker = Broker::bind(&address, Limits::default()).unwrap().spawn().unwrap();
    let producer = BrokerClient::connect(&address).unwrap();
    let consumer = BrokerClient::connect(&address).unwrap();
    let held = producer.put_frozen("held", &frozen(b"held"), Lifetime::Held).unwrap();
    let kept = producer.put_frozen("kept", &frozen(b"kept"), Lifetime::Kept).unwrap();
    assert_ne!(held.generation(), kept.generation());
    let taken = producer.put_frozen("held", &frozen(b""), Lifetime::Held);
    assert_eq!(reason(taken), Reason::Taken);
    let got = consumer.get("held").unwrap();
    assert_eq!((got.kind, got.len), (ThingKind::FROZEN, 4));
    drop((held, kept, producer));
    until(&consumer, 2, 1);
    let bytes = got.into_frozen().unwrap();
    until(&consumer, 1, 0);
    assert_eq!(&*bytes, b"held", "what was mapped stays");
    assert_eq!(reason(consumer.get("held")), Reason::Unknown);
    assert_eq!(&*consumer.get("kept").unwrap().into_frozen().unwrap(), b"kept");
    consumer.remove("kept").unwrap();
    assert_eq!(reason(consumer.remove("kept")), Reason::Unknown);
    until(&consumer, 0, 0);
    broker.stop().unwrap();
    assert!(matches!(consumer.stats(), Err(Error::PeerGone)));
}

#[test]
fn a_removed_name_is_free_while_its_thing_is_still_held() {
    let address = address();
    let _broker = Broker::bind(&address, Limits::default()).unwrap().spawn().unwrap();
    let client = BrokerClient::connect(&address).unwrap();
    let old = client.put_frozen("x", &frozen(b"old"), Lifetime::Kept).unwrap();
    client.remove("x").unwrap();
    let new = client.put_frozen("x", &frozen(b"new!"), Lifetime::Kept).unwrap();
    until(&client, 2, 2);
    drop(old);
    until(&client, 1, 1);
    drop(new);
    assert_eq!(client.get("x").unwrap().len, 4);
}

#[test]
fn limits_refuse_and_change_nothing() {
    let address = address();
    let limits = Limits { clients: 2, things: 3, bytes: 10_000, things_per_client: 2 };
    let _broker = Broker::bind(&address, limits).unwrap().spawn().unwrap();
    let one = BrokerClient::connect(&address).unwrap();
    let two = BrokerClient::connect(&address).unwrap();
    until(&two, 0, 0);
    let three = BrokerClient::connect(&address).unwrap();
    let refused = three.stats();
    assert!(
        matches!(refused, Err(Error::Broker { reason: Reason::TooManyClients, .. })),
        "{refused:?}"
    );
    let put = |client: &BrokerClient, name: &str, len: usize| {
        client.put_frozen(name, &frozen(&vec![1; len]), Lifetime::Held)
    };
    let _a = put(&one, "a", 4000).unwrap();
    assert_eq!(reason(put(&one, "b", 6001)), Reason::TooManyBytes);
    let _b = put(&one, "b", 10).unwrap();
    assert_eq!(reason(put(&one, "c", 10)), Reason::TooManyThings, "of one client");
    let _c = put(&two, "c", 10).unwrap();
    assert_eq!(reason(put(&two, "d", 10)), Reason::TooManyThings, "of all");
    let stats = two.stats().unwrap();
    assert_eq!((stats.clients, stats.things, stats.bytes, stats.holds), (2, 3, 4020, 3));
    drop(one);
    drop((_a, _b));
    until_it_has(&two, |stats| (stats.clients, stats.things) == (1, 1));
    let four = BrokerClient::connect(&address).unwrap();
    assert_eq!(four.stats().unwrap().clients, 2, "there is room again");
}

#[test]
fn descriptors_are_checked_and_other_handles_travel_as_they_are() {
    let address = address();
    let _broker = Broker::bind(&address, Limits::default()).unwrap().spawn().unwrap();
    let client = BrokerClient::connect(&address).unwrap();
    let map = MapOptions::memfd("plain").len(4096).keep_descriptor().map().unwrap();
    let arena = Arena::new(8192).unwrap();
    let sealed = frozen(b"sealed");
    let put = |kind, len, fd, opaque: &[u8]| {
        client.put("x", kind, Lifetime::Held, len, fd, opaque).map(drop)
    };
    for (kind, len, fd) in [
        (ThingKind::FROZEN, 10, Some(map.as_fd())),
        (ThingKind::FROZEN, 7, Some(sealed.as_fd())),
        (ThingKind::FROZEN, 6, None),
        (ThingKind::SHARED, 4097, Some(map.as_fd())),
        (ThingKind::ARENA, 4096, Some(map.as_fd())),
        (ThingKind(77), 10, Some(map.as_fd())),
    ] {
        assert_eq!(reason(put(kind, len, fd, &[])), Reason::Invalid, "{kind:?} {len}");
    }
    put(ThingKind::ARENA, 8192, Some(arena.as_fd()), &[]).unwrap();
    let _hold = client.put_shared("shared", &map, Lifetime::Held).unwrap();
    let other = client.get("shared").unwrap().into_map().unwrap();
    other.write_at(5, b"both").unwrap();
    assert_eq!(&map.to_vec()[5..9], b"both");

    // A handle of device memory: 64 opaque bytes, no descriptor.
    let handle = [7; 64];
    let kind = ThingKind(ThingKind::OPAQUE.0 + 1);
    let _device = client.put("device", kind, Lifetime::Held, 1 << 30, None, &handle).unwrap();
    let got = client.get("device").unwrap();
    assert_eq!((got.kind, got.len, got.opaque.as_slice()), (kind, 1 << 30, &handle[..]));
    assert!(got.fd.is_none() && got.duplicate().is_err());
    assert!(got.into_frozen().is_err());
    let long = client.put(&"n".repeat(201), kind, Lifetime::Held, 1, None, &[]);
    assert!(matches!(long, Err(Error::Name { .. })), "{long:?}");
}

#[test]
fn a_client_that_talks_nonsense_is_put_out_and_harms_nobody() {
    use nix::sys::socket::*;
    let address = address();
    let SocketAddress::Abstract(label) = &address else { unreachable!() };
    let _broker = Broker::bind(&address, Limits::default()).unwrap().spawn().unwrap();
    let good = BrokerClient::connect(&address).unwrap();
    let _hold = good.put_frozen("x", &frozen(b"x"), Lifetime::Held).unwrap();
    let raw = || {
        let socket =
            socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::empty(), None).unwrap();
        let to = UnixAddr::new_abstract(label.as_bytes()).unwrap();
        connect(std::os::fd::AsRawFd::as_raw_fd(&socket), &to).unwrap();
        socket
    };
    for nonsense in [vec![0; 1], vec![0xff; 72], vec![1; 1096], b"GSHM".repeat(20)] {
        let socket = raw();
        nix::unistd::write(&socket, &nonsense).unwrap();
        let mut answer = [0; 10];
        assert_eq!(nix::unistd::read(&socket, &mut answer), Ok(0), "hung up on");
    }
    assert_eq!(good.stats().unwrap().clients, 1);
    assert_eq!(&*good.get("x").unwrap().into_frozen().unwrap(), b"x");
}

#[test]
fn many_clients_in_many_threads() {
    let address = address();
    let _broker = Broker::bind(&address, Limits::default()).unwrap().spawn().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..6u8 {
            let address = &address;
            scope.spawn(move || {
                let client = BrokerClient::connect(address).unwrap();
                for i in 0..30 {
                    let name = format!("{thread}-{i}");
                    let hold = client.put_frozen(&name, &frozen(&[thread]), Lifetime::Held);
                    assert_eq!(&*client.get(&name).unwrap().into_frozen().unwrap(), [thread]);
                    drop(hold);
                }
            });
        }
    });
    let client = BrokerClient::connect(&address).unwrap();
    until(&client, 0, 0);
}

/// A broker in a process of its own.
struct Process {
    child: Child,
}

impl Process {
    fn start(path: &std::path::Path) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_shm-broker"))
            .arg("--path")
            .arg(path)
            .args(["--clients", "8"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, format!("ready {}\n", path.display()));
        Process { child }
    }

    fn signal(&mut self, signal: nix::sys::signal::Signal) -> std::process::ExitStatus {
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        nix::sys::signal::kill(pid, signal).unwrap();
        self.child.wait().unwrap()
    }
}

#[test]
fn a_broker_of_its_own_dies_without_harm_and_its_place_is_taken() {
    use nix::sys::signal::Signal;
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("broker.sock");
    let address = SocketAddress::Path(path.clone());
    let mut first = Process::start(&path);
    let client = BrokerClient::connect(&address).unwrap();
    let hold = client.put_frozen("x", &frozen(b"survives"), Lifetime::Kept).unwrap();
    let got = client.get("x").unwrap();
    first.signal(Signal::SIGKILL);
    assert!(path.exists(), "nobody could remove it");
    assert!(matches!(client.get("x"), Err(Error::PeerGone)));
    assert_eq!(&*got.into_frozen().unwrap(), b"survives");
    drop((hold, client));

    let mut second = Process::start(&path);
    let client = BrokerClient::connect(&address).unwrap();
    assert_eq!(reason(client.get("x")), Reason::Unknown);
    let third = Broker::bind(&address, Limits::default());
    assert!(matches!(third, Err(Error::Exists { .. })), "{third:?}");
    assert!(second.signal(Signal::SIGTERM).success());
    assert!(!path.exists());
}

#[test]
fn the_program_explains_itself() {
    let run = |arguments: &[&str]| {
        let output =
            Command::new(env!("CARGO_BIN_EXE_shm-broker")).args(arguments).output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    for arguments in [&[][..], &["--path"], &["--nonsense", "1"]] {
        let (success, text) = run(arguments);
        assert!(!success && text.contains("usage:"), "{text}");
    }
    let (success, text) = run(&["--path", &"x".repeat(200)]);
    assert!(!success && text.contains("107 bytes"), "{text}");
}
