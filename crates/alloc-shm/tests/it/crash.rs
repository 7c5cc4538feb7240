//! Processes killed at every step of the protocols, and one that survives them all.
//!
//! The survivor runs the rounds. In each it starts a victim, which plays one scene with it and is
//! killed: by itself at a step drawn at random, or by the survivor after a random time. Then the
//! survivor checks that everything it received is whole, that everything it lent is back, that the
//! sweeper finds no name but the survivor's own, and in the end that it has no descriptor, no
//! mapping and no byte of shared memory more than before.

use crate::child::{argument, entries, start, start_with_channel, temporary, test_dir, wait};
use crate::full::{MOUNT_REFUSED, may_mount, mount_small};
use crate::traces::{descriptors, mappings};
use alloc_shm::broker::{Broker, BrokerClient, BrokerThread, Lifetime, Limits, ThingKind};
use alloc_shm::steps;
use alloc_shm::{
    ArenaPool, Channel, Draft, Error, Frozen, Item, Map, MapOptions, NameKind, PoolConfig,
    ReadWrite, ReceivedBlock, SharedMap, ShmDir, SocketAddress, sweep,
};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Stdio};
use std::rc::Rc;
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(20);
/// Tag of the note with which a victim that was not killed says how many steps it took.
const STEPS: u64 = u64::MAX;

/// What a victim and the survivor do together.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Scene {
    /// The victim sends new shared memory by descriptor.
    Descriptors,
    /// The victim freezes memfds and sends them.
    Frozen,
    /// The victim sends names of maps that it lets go of at once.
    Names,
    /// The victim sends blocks, from arenas that come and go.
    Blocks,
    /// The victim receives everything from the survivor, keeps some of it and drops the rest.
    Receive,
    /// The victim holds and leaves the survivor's map again and again.
    Hold,
    /// The victim sweeps, and makes names that it alone would remove.
    Own,
    /// The victim puts, gets and releases things at the survivor's broker.
    Broker,
}

const SCENES: [Scene; 8] = [
    Scene::Descriptors,
    Scene::Frozen,
    Scene::Names,
    Scene::Blocks,
    Scene::Receive,
    Scene::Hold,
    Scene::Own,
    Scene::Broker,
];

/// The content of an item with this tag.
fn content(tag: u64) -> Vec<u8> {
    let len = 100 + tag.wrapping_mul(977) % 9000;
    (0..len).map(|i| (tag.wrapping_mul(31) + i) as u8).collect()
}

fn frozen(tag: u64) -> Frozen {
    let bytes = content(tag);
    let mut draft = Draft::new(bytes.len() as u64).unwrap();
    draft.copy_from_slice(&bytes);
    draft.freeze().unwrap()
}

fn counted(dir: &ShmDir, tag: u64) -> SharedMap {
    let bytes = content(tag);
    let map = SharedMap::create_unique(dir, bytes.len() as u64).unwrap();
    map.write_at(0, &bytes).unwrap();
    map
}

fn read(map: &SharedMap) -> Vec<u8> {
    let mut bytes = vec![0; map.len() as usize];
    map.read_at(0, &mut bytes).unwrap();
    bytes
}

fn small_pool() -> ArenaPool {
    ArenaPool::new(PoolConfig { arena_bytes: 32 << 10, arenas_max: 64 })
}

/// What someone received and keeps.
enum Kept {
    Bytes(Vec<u8>),
    Frozen(Frozen),
    Named(SharedMap),
    Block(ReceivedBlock),
}

impl Kept {
    fn of(item: Item) -> Self {
        match item {
            Item::Descriptor(incoming) => Kept::Bytes(incoming.map().unwrap().to_vec()),
            Item::Frozen(frozen) => Kept::Frozen(frozen),
            Item::Named(map) => Kept::Named(map),
            Item::Block(block) => Kept::Block(block),
            other => panic!("{other:?}"),
        }
    }

    fn is_whole(&self, tag: u64) -> bool {
        let expected = content(tag);
        match self {
            Kept::Bytes(bytes) => *bytes == expected,
            Kept::Frozen(frozen) => **frozen == expected,
            Kept::Named(map) => read(map) == expected,
            Kept::Block(block) => **block == expected,
        }
    }
}

// ---------------------------------------------------------------------------------------- victims

/// The role of a victim: plays its scene, and dies at its step unless that never comes.
pub(crate) fn victim() {
    let dir = test_dir(Path::new(&argument("DIR")));
    let fatal: u64 = argument("FATAL").parse().unwrap();
    let seed: u64 = argument("SEED").parse().unwrap();
    let scene = SCENES[argument("SCENE").parse::<usize>().unwrap()];
    let channel = Channel::from_stdin().unwrap().with_dir(dir.clone());
    let taken = Rc::new(Cell::new(0));
    let count = Rc::clone(&taken);
    steps::on_step(move |_| {
        if count.get() == fatal {
            let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL);
        }
        count.set(count.get() + 1);
        Ok(())
    });
    let kept = scene.victim(&channel, &dir, seed);
    steps::clear();
    channel.send_note(&u64::to_le_bytes(taken.get()), STEPS).unwrap();
    // What is kept is dropped by dying, as everything else.
    std::mem::forget(kept);
    let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL);
}

/// How many items the victim has sent, in memory that the survivor has too.
struct Progress(Map<ReadWrite, OwnedFd>);

impl Progress {
    /// The survivor sends it before anything else.
    fn receive(channel: &Channel) -> Self {
        let Item::Descriptor(incoming) = channel.receive().unwrap().item else { panic!() };
        Progress(incoming.map().unwrap())
    }

    fn add_one(&self) {
        self.0.write_at(0, &(self.sent() + 1).to_le_bytes()).unwrap();
    }

    fn sent(&self) -> u64 {
        let mut sent = [0; 8];
        self.0.read_at(0, &mut sent).unwrap();
        u64::from_le_bytes(sent)
    }
}

impl Scene {
    fn victim(self, channel: &Channel, dir: &ShmDir, seed: u64) -> Vec<Kept> {
        let progress = Progress::receive(channel);
        let send_all = |send: &dyn Fn(u64)| {
            (0..SENT_BY_VICTIM).map(|i| seed * 100 + i).for_each(|tag| {
                send(tag);
                progress.add_one();
            });
        };
        match self {
            Scene::Descriptors => send_all(&|tag| send_descriptor(channel, dir, tag)),
            Scene::Frozen => send_all(&|tag| channel.send_frozen(&frozen(tag), tag).unwrap()),
            Scene::Names => {
                send_all(&|tag| channel.send_named(&counted(dir, tag), tag).unwrap());
            }
            Scene::Blocks => {
                let pool = small_pool();
                send_all(&|tag| send_block(channel, &pool, tag));
            }
            Scene::Receive => return receive_some(channel, seed),
            Scene::Hold => hold_and_leave(dir),
            Scene::Own => own_names(dir),
            Scene::Broker => use_broker(seed),
        }
        Vec::new()
    }
}

fn send_descriptor(channel: &Channel, dir: &ShmDir, tag: u64) {
    let bytes = content(tag);
    let options = MapOptions::unique(dir).len(bytes.len() as u64);
    let map = options.keep_descriptor().unlink_at_once().map().unwrap();
    map.write_at(0, &bytes).unwrap();
    channel.send_descriptor(&map, tag).unwrap();
}

fn send_block(channel: &Channel, pool: &ArenaPool, tag: u64) {
    let bytes = content(tag);
    let mut block = pool.allocate(bytes.len() as u64).unwrap();
    block.copy_from_slice(&bytes);
    channel.send_block(&block.share(), tag).unwrap();
    pool.trim();
}

/// Receives what the survivor sends, checks it, and keeps every third item.
fn receive_some(channel: &Channel, seed: u64) -> Vec<Kept> {
    let mut kept = Vec::new();
    for i in 0..SENT_EACH {
        let received = channel.receive_timeout(SOON).unwrap();
        let item = Kept::of(received.item);
        assert!(item.is_whole(received.tag), "the victim got {}", received.tag);
        if (seed + i).is_multiple_of(3) {
            kept.push(item);
        }
    }
    kept
}

const SENT_EACH: u64 = 12;
const SENT_BY_VICTIM: u64 = 6;

fn hold_and_leave(dir: &ShmDir) {
    let name = dir.labelled(NameKind::Counted, "survivors").unwrap();
    for _ in 0..3 {
        let one = SharedMap::attach(dir, &name).unwrap();
        let two = SharedMap::attach(dir, &name).unwrap();
        assert_eq!(read(&one), content(7));
        drop((one, two));
    }
}

fn own_names(dir: &ShmDir) {
    assert!(sweep(dir).unwrap().failed.is_empty());
    for tag in 0..3 {
        let plain = MapOptions::unique(dir).len(5000).map().unwrap();
        let counted = counted(dir, tag);
        drop((plain, counted));
    }
}

fn use_broker(seed: u64) {
    let address = SocketAddress::Abstract(argument("BROKER"));
    let client = BrokerClient::connect(&address).unwrap();
    let weights = client.get("weights").unwrap().into_frozen().unwrap();
    assert_eq!(*weights, *content(1));
    for i in 0..3 {
        let name = format!("victim-{seed}-{i}");
        let hold = client.put_frozen(&name, &frozen(i), Lifetime::Held).unwrap();
        let got = client.get(&name).unwrap();
        assert_eq!(got.kind, ThingKind::FROZEN);
        drop(hold);
        assert_eq!(*got.into_frozen().unwrap(), *content(i));
    }
}

// ----------------------------------------------------------------------------------- the survivor

struct Survivor {
    dir: ShmDir,
    random: Random,
    /// Steps that a victim takes in a scene when nobody kills it.
    lengths: BTreeMap<Scene, u64>,
    /// Received in earlier rounds from victims that are dead.
    kept: Vec<(u64, Kept)>,
    held: SharedMap,
    pool: ArenaPool,
    broker_label: String,
    broker: BrokerThread,
    client: BrokerClient,
    rounds: u64,
    killed: BTreeMap<(Scene, bool), u64>,
    received: u64,
}

/// The role of the survivor.
pub(crate) fn survivor() {
    let place = argument("DIR");
    let place = Path::new(&place);
    let mounted = mount_small(place, 16 << 20);
    if let Err(errno) = mounted {
        eprintln!("mounting is refused here ({errno}): what stays in memory is not measured");
    }
    // The first of everything may open something for good.
    ready_process(place);
    let before = (descriptors("self", |_| true), mappings("self", ""));
    let rounds: u64 = argument("ROUNDS").parse().unwrap();
    let mut survivor = Survivor::new(place, argument("SEED").parse().unwrap());
    for _ in 0..rounds {
        survivor.round();
    }
    let report = survivor.report();
    survivor.finish();
    assert_eq!(entries(place), [""; 0], "no name is left");
    assert_eq!(descriptors("self", |_| true), before.0, "no descriptor is left");
    for text in [place.to_str().unwrap(), "memfd:"] {
        assert_eq!(mappings("self", text), 0, "no mapping is left");
    }
    if mounted.is_ok() {
        let stat = nix::sys::statvfs::statvfs(place).unwrap();
        assert_eq!(stat.blocks_free(), stat.blocks(), "no byte is left");
    }
    eprintln!("{report}");
    if mounted.is_err() {
        std::process::exit(MOUNT_REFUSED);
    }
}

/// Starts and ends a process and a thread once.
fn ready_process(place: &Path) {
    let (mut child, _channel) = start_with_channel("echo", &[("WORD", "")], &test_dir(place));
    wait(&mut child);
    std::thread::spawn(|| ()).join().unwrap();
}

impl Survivor {
    fn new(place: &Path, seed: u64) -> Self {
        let dir = test_dir(place);
        let name = dir.labelled(NameKind::Counted, "survivors").unwrap();
        let bytes = content(7);
        let held = SharedMap::create(&dir, &name, bytes.len() as u64).unwrap();
        held.write_at(0, &bytes).unwrap();
        let broker_label = format!("alloc-shm-crash-{}", std::process::id());
        let address = SocketAddress::Abstract(broker_label.clone());
        let broker = Broker::bind(&address, Limits::default()).unwrap().spawn().unwrap();
        let client = BrokerClient::connect(&address).unwrap();
        drop(client.put_frozen("weights", &frozen(1), Lifetime::Kept).unwrap());
        Survivor {
            dir,
            random: Random(seed),
            lengths: BTreeMap::new(),
            kept: Vec::new(),
            held,
            pool: small_pool(),
            broker_label,
            broker,
            client,
            rounds: 0,
            killed: BTreeMap::new(),
            received: 0,
        }
    }

    /// One victim, from birth to burial.
    fn round(&mut self) {
        self.rounds += 1;
        let index = self.random.below(SCENES.len() as u64);
        let scene = SCENES[index as usize];
        // The first victim of a scene tells how long it is; later ones die before its end.
        let length = self.lengths.get(&scene).copied();
        let by_clock = length.is_some() && self.random.below(4) == 0;
        let fatal = match length {
            Some(length) if !by_clock => self.random.below(length),
            _ => u64::MAX,
        };
        let arguments = [
            ("DIR", self.dir.path().display().to_string()),
            ("FATAL", fatal.to_string()),
            ("SEED", self.rounds.to_string()),
            ("SCENE", index.to_string()),
            ("BROKER", self.broker_label.clone()),
        ];
        let arguments = arguments.each_ref().map(|(key, value)| (*key, value.as_str()));
        let (mut child, channel) = start_with_channel("victim", &arguments, &self.dir);
        let doom = by_clock.then(|| Duration::from_micros(self.random.below(15_000)));
        let doom = doom.map(|after| kill_after(&child, after));
        self.play(scene, &channel);
        doom.into_iter().for_each(|thread| thread.join().unwrap());
        let status = wait(&mut child);
        let killed = std::os::unix::process::ExitStatusExt::signal(&status) == Some(9);
        assert!(killed, "{scene:?}, fatal step {fatal}: the victim ended with {status}");
        *self.killed.entry((scene, by_clock)).or_default() += 1;
        drop(channel);
        self.check_round(scene);
    }

    /// The survivor's part in a scene, until the victim is gone.
    fn play(&mut self, scene: Scene, channel: &Channel) {
        let memory = MapOptions::memfd("progress").len(8).keep_descriptor().map().unwrap();
        let progress = Progress(memory);
        match channel.send_descriptor(&progress.0, 0) {
            Ok(()) | Err(Error::PeerGone) => {}
            Err(error) => panic!("{error}"),
        }
        let mut next = self.rounds * 100;
        if scene == Scene::Receive {
            self.send_everything(channel);
        }
        loop {
            match channel.receive_timeout(SOON) {
                Err(Error::PeerGone) => break,
                Ok(received) if received.tag == STEPS => {
                    let Item::Note(steps) = received.item else { panic!("{received:?}") };
                    let steps = u64::from_le_bytes(steps.try_into().unwrap());
                    assert!(steps > 10, "{scene:?} has {steps} steps");
                    self.lengths.entry(scene).or_insert(steps);
                }
                Ok(received) => {
                    let item = Kept::of(received.item);
                    assert!(item.is_whole(received.tag), "{scene:?}: item {}", received.tag);
                    assert_eq!(received.tag, next, "{scene:?}: every item, in order");
                    next += 1;
                    self.received += 1;
                    if self.random.below(3) == 0 {
                        self.kept.push((received.tag, item));
                    }
                }
                Err(error) => panic!("{scene:?}: {error}"),
            }
        }
        let (sent, got) = (progress.sent(), next - self.rounds * 100);
        // The victim may have died between sending and counting, never the other way round.
        assert!(got == sent || got == sent + 1, "{scene:?}: {sent} were sent, {got} received");
        assert_eq!(channel.lent(), 0, "{scene:?}: everything is back");
    }

    /// Sends one of everything, over and over, until the victim no longer takes it.
    fn send_everything(&mut self, channel: &Channel) {
        for i in 0..SENT_EACH {
            let tag = self.rounds * 100 + i;
            let sent = match i % 4 {
                0 => self.send_map(channel, tag),
                1 => channel.send_frozen(&frozen(tag), tag),
                2 => channel.send_named(&counted(&self.dir, tag), tag),
                _ => {
                    let bytes = content(tag);
                    let mut block = self.pool.allocate(bytes.len() as u64).unwrap();
                    block.copy_from_slice(&bytes);
                    channel.send_block(&block.share(), tag)
                }
            };
            match sent {
                Ok(()) => {}
                Err(Error::PeerGone) => return,
                Err(error) => panic!("{error}"),
            }
        }
    }

    fn send_map(&self, channel: &Channel, tag: u64) -> alloc_shm::Result<()> {
        let bytes = content(tag);
        let map = MapOptions::memfd("sent").len(bytes.len() as u64).keep_descriptor().map()?;
        map.write_at(0, &bytes)?;
        channel.send_descriptor(&map, tag)
    }

    fn check_round(&mut self, scene: Scene) {
        // Sometimes the next victim finds what this one left, and dies while it sweeps.
        if scene == Scene::Own && self.random.below(2) == 0 {
            return;
        }
        let swept = sweep(&self.dir).unwrap();
        assert!(swept.failed.is_empty(), "{scene:?}: {:?}", swept.failed);
        let mine = self.kept.iter().filter(|(_, kept)| matches!(kept, Kept::Named(_))).count();
        // The survivor's own map, and the named ones it keeps.
        assert_eq!(entries(self.dir.path()).len(), 1 + mine, "{scene:?}: {swept:?}");
        assert_eq!(self.pool.stats().live_blocks, 0, "{scene:?}: every block is back");
        assert_eq!(read(&self.held), content(7), "{scene:?}");
        drop(SharedMap::attach(&self.dir, self.held.name()).unwrap());
        assert_eq!(self.held.holds(), 1, "{scene:?}: the dead hold nothing");
        if scene == Scene::Broker {
            self.check_broker();
        }
        if self.rounds.is_multiple_of(20) {
            for (tag, kept) in &self.kept {
                assert!(kept.is_whole(*tag), "item {tag}, whose sender is long dead");
            }
            self.kept.truncate(10);
        }
    }

    /// The broker hears of the death as fast as it gets to it.
    fn check_broker(&self) {
        let deadline = Instant::now() + SOON;
        loop {
            let stats = self.client.stats().unwrap();
            if (stats.clients, stats.things, stats.holds) == (1, 1, 0) {
                return;
            }
            assert!(Instant::now() < deadline, "the broker still has {stats:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn report(&self) -> String {
        let by = |clock| self.killed.iter().filter(move |((_, c), _)| *c == clock);
        let steps: u64 = by(false).map(|(_, n)| n).sum();
        let clock: u64 = by(true).map(|(_, n)| n).sum();
        let lengths: Vec<String> =
            self.lengths.iter().map(|(scene, n)| format!("{scene:?} {n}")).collect();
        format!(
            "{} processes killed: {steps} at a step, {clock} by the clock; {} items received \
             whole; steps: {}",
            self.rounds,
            self.received,
            lengths.join(", ")
        )
    }

    fn finish(self) {
        let Survivor { kept, client, broker, held, pool, .. } = self;
        for (tag, kept) in &kept {
            assert!(kept.is_whole(*tag), "item {tag}");
        }
        drop((kept, client, held, pool));
        broker.stop().unwrap();
    }
}

/// Kills a process after a while, from a thread.
fn kill_after(child: &Child, after: Duration) -> std::thread::JoinHandle<()> {
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    std::thread::spawn(move || {
        std::thread::sleep(after);
        // Not yet waited for, so the pid is still this child's, dead or alive.
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
    })
}

/// A small generator: the seed gives the whole run.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (self.0 >> 33) % bound
    }
}

/// Runs the survivor in a process of its own; answers what it says.
pub(crate) fn run(rounds: u64, seed: u64) {
    let place = temporary();
    let dir = place.path().to_str().unwrap();
    let (rounds, seed_text) = (rounds.to_string(), seed.to_string());
    let arguments = [("DIR", dir), ("ROUNDS", rounds.as_str()), ("SEED", &seed_text)];
    let mut command = may_mount(crate::child::command("survivor", &arguments));
    command.stdin(Stdio::null());
    let status = match command.status() {
        Ok(status) => status,
        // No way to get a mount of its own: the directory will do, but for the bytes.
        Err(_) => start("survivor", &arguments, Stdio::null()).wait().unwrap(),
    };
    let good = status.success() || status.code() == Some(MOUNT_REFUSED);
    assert!(good, "seed {seed}: {status}");
}

/// `ALLOC_SHM_KILLS` runs more of them than fit into an ordinary test run.
#[test]
fn survivors_lose_nothing_and_keep_nothing_of_the_dead() {
    let rounds = std::env::var("ALLOC_SHM_KILLS").map_or(500, |kills| kills.parse().unwrap());
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let seed = std::env::var("ALLOC_SHM_SEED")
        .map_or(clock.as_nanos() as u64, |seed| seed.parse().unwrap());
    run(rounds, seed);
}
