//! Names of shared memory: unique by construction, short, prefixed, and telling who made them.
//!
//! ```text
//! gsm-mu3k.9f2c1.1psfx6.0      prefix - kind, u: unique . pid . start . pid namespace . counter
//! gsm-rnweights                prefix - kind, n: named by the user . label
//! ```
//!
//! Numbers are in base 36. The kind is `m` for a plain map and `r` for a reference-counted one.

use crate::error::{Error, Result};
use crate::process::{ProcessId, pid_namespace};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const PREFIX_DEFAULT: &str = "gsm";
const PREFIX_LEN_MAX: usize = 6;
const LABEL_LEN_MAX: usize = 64;

/// A directory of shared memory, and the prefix of the names that belong to us there.
///
/// Cheap to clone. Two users of one directory that choose different prefixes never see each
/// other's names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ShmDir {
    path: Arc<Path>,
    prefix: Arc<str>,
}

impl ShmDir {
    /// The system's: `/dev/shm`, where POSIX shared memory lives.
    pub fn system() -> Self {
        ShmDir { path: Path::new("/dev/shm").into(), prefix: PREFIX_DEFAULT.into() }
    }

    /// Another directory, usually on a tmpfs of its own.
    ///
    /// # Errors
    ///
    /// [`Error::Name`] if `path` is no directory.
    pub fn at(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if !path.is_dir() {
            return Err(bad(path.display(), "not a directory"));
        }
        Ok(ShmDir { path: path.into(), prefix: PREFIX_DEFAULT.into() })
    }

    /// The same directory with a prefix of one's own: 1 to 6 of `a`-`z` and `0`-`9`.
    ///
    /// # Errors
    ///
    /// [`Error::Name`] for any other prefix.
    pub fn with_prefix(self, prefix: &str) -> Result<Self> {
        let legal = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
        if !(1..=PREFIX_LEN_MAX).contains(&prefix.len()) || !prefix.bytes().all(legal) {
            return Err(bad(prefix, "a prefix is 1 to 6 of a-z and 0-9"));
        }
        Ok(ShmDir { prefix: prefix.into(), ..self })
    }

    /// The directory's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The prefix of our names.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    /// A name that no other process, and no other call, is given.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] where `/proc` is not mounted.
    pub fn unique(&self, kind: NameKind) -> Result<Name> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let maker = ProcessId::current()?;
        let (pid, start) = (base36(maker.pid().into()), base36(maker.start_ticks()));
        let namespace = base36(pid_namespace()?.into());
        let counter = base36(COUNTER.fetch_add(1, Ordering::Relaxed));
        let prefix = &self.prefix;
        let kind = kind.letter();
        Ok(Name(format!("{prefix}-{kind}u{pid}.{start}.{namespace}.{counter}").into()))
    }

    /// A name with a label that other processes know: 1 to 64 of letters, digits, `_`, `-`, `.`.
    ///
    /// # Errors
    ///
    /// [`Error::Name`] for any other label.
    pub fn labelled(&self, kind: NameKind, label: &str) -> Result<Name> {
        let legal = |b: u8| b.is_ascii_alphanumeric() || b"_-.".contains(&b);
        if !(1..=LABEL_LEN_MAX).contains(&label.len()) || !label.bytes().all(legal) {
            return Err(bad(label, "a label is 1 to 64 of letters, digits, '_', '-' and '.'"));
        }
        Ok(Name(format!("{}-{}n{label}", self.prefix, kind.letter()).into()))
    }

    /// Reads a name of this directory's prefix; `None` for a name that is not ours.
    pub fn parse(&self, text: &str) -> Option<Name> {
        let rest = text.strip_prefix(&*self.prefix)?.strip_prefix('-')?;
        let kind = NameKind::of_letter(rest.chars().next()?)?;
        let who = &rest[1..];
        match who.chars().next()? {
            'u' => parse_maker(&who[1..]).map(|_| Name(text.into())),
            'n' => self.labelled(kind, &who[1..]).ok(),
            _ => None,
        }
    }

    pub(crate) fn path_of(&self, name: &Name) -> PathBuf {
        self.path.join(&*name.0)
    }
}

/// What stands behind a name.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum NameKind {
    /// A plain map: its maker removes the name.
    Plain,
    /// A reference-counted map: its last holder removes the name.
    Counted,
}

impl NameKind {
    fn letter(self) -> char {
        match self {
            NameKind::Plain => 'm',
            NameKind::Counted => 'r',
        }
    }

    fn of_letter(letter: char) -> Option<Self> {
        match letter {
            'm' => Some(NameKind::Plain),
            'r' => Some(NameKind::Counted),
            _ => None,
        }
    }
}

/// The name of an object in a [`ShmDir`], without the directory.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Name(Box<str>);

impl Name {
    /// What stands behind it.
    pub fn kind(&self) -> NameKind {
        // Every name is made or parsed by `ShmDir`, which puts the letter after the first dash.
        let letter = self.after_prefix().chars().next();
        letter.and_then(NameKind::of_letter).unwrap_or(NameKind::Plain)
    }

    /// Who made a unique name; `None` for a labelled one.
    pub fn maker(&self) -> Option<Maker> {
        parse_maker(self.after_prefix().get(1..)?.strip_prefix('u')?)
    }

    /// The whole text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    fn after_prefix(&self) -> &str {
        self.0.split_once('-').map_or("", |(_, rest)| rest)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The process that made a unique name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Maker {
    /// The process.
    pub process: ProcessId,
    /// The pid namespace in which its pid means something.
    pub pid_namespace: u32,
}

/// Reads `pid.start.namespace.counter`.
fn parse_maker(text: &str) -> Option<Maker> {
    let mut fields = text.split('.').map(parse_base36);
    let pid = u32::try_from(fields.next()??).ok()?;
    let start = fields.next()??;
    let pid_namespace = u32::try_from(fields.next()??).ok()?;
    fields.next()??;
    if fields.next().is_some() {
        return None;
    }
    Some(Maker { process: ProcessId::new(pid, start)?, pid_namespace })
}

/// Reads what `base36` writes, and nothing else: no sign, no leading zero, no capital.
fn parse_base36(text: &str) -> Option<u64> {
    let number = u64::from_str_radix(text, 36).ok()?;
    (base36(number) == text).then_some(number)
}

fn base36(mut number: u64) -> String {
    const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
    let mut text = Vec::new();
    loop {
        text.push(DIGITS[(number % 36) as usize] as char);
        number /= 36;
        if number == 0 {
            return text.iter().rev().collect();
        }
    }
}

fn bad(name: impl fmt::Display, why: &'static str) -> Error {
    Error::Name { name: name.to_string(), why }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn unique_names_are_short_parse_back_and_tell_their_maker() {
        let dir = ShmDir::system();
        let first = dir.unique(NameKind::Plain).unwrap();
        let second = dir.unique(NameKind::Counted).unwrap();
        assert_ne!(first, second);
        for name in [&first, &second] {
            assert!(name.as_str().len() <= 48, "{name}");
            assert_eq!(dir.parse(name.as_str()).as_ref(), Some(name));
            let maker = name.maker().unwrap();
            assert_eq!(maker.process, ProcessId::current().unwrap());
            assert_eq!(maker.pid_namespace, pid_namespace().unwrap());
        }
        assert_eq!(first.kind(), NameKind::Plain);
        assert_eq!(second.kind(), NameKind::Counted);
    }

    #[test]
    fn labels_and_prefixes_are_checked() {
        let dir = ShmDir::system().with_prefix("ab1").unwrap();
        let name = dir.labelled(NameKind::Counted, "layer.0-w").unwrap();
        assert_eq!(name.as_str(), "ab1-rnlayer.0-w");
        assert_eq!((name.kind(), name.maker()), (NameKind::Counted, None));
        assert!(ShmDir::system().parse(name.as_str()).is_none(), "another prefix is not ours");
        for label in ["", "a/b", "a b", "ü", &"x".repeat(65)] {
            assert!(dir.labelled(NameKind::Plain, label).is_err(), "{label}");
        }
        for prefix in ["", "toolong", "a-b", "A"] {
            assert!(ShmDir::system().with_prefix(prefix).is_err(), "{prefix}");
        }
        assert!(ShmDir::at("/proc/self/stat").is_err());
    }

    #[test]
    fn names_that_are_not_ours_do_not_parse() {
        let dir = ShmDir::system();
        for text in [
            "",
            "gsm",
            "gsm-",
            "gsm-m",
            "gsm-xn1",
            "gsm-mu1.2.3",
            "gsm-mu1.2.3.4.5",
            "gsm-mn",
            "gsm-mu+1.2.3.4",
            "gsm-mu01.2.3.4",
            "gsm-mu0.2.3.4",
            "torch_1_2_3",
            "gsm-mn../x",
        ] {
            assert!(dir.parse(text).is_none(), "{text}");
        }
    }

    proptest! {
        #[test]
        fn parsing_never_panics_and_gives_back_only_the_text(text in "gsm-[mrx][unz][a-z0-9./]{0,30}") {
            if let Some(name) = ShmDir::system().parse(&text) {
                prop_assert_eq!(name.as_str(), text);
                prop_assert!(!name.as_str().contains('/'));
            }
        }

        #[test]
        fn base36_round_trips(number: u64) {
            prop_assert_eq!(parse_base36(&base36(number)), Some(number));
        }
    }
}
