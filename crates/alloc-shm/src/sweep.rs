//! Removes names that nobody is left to remove.

use crate::error::{Error, Result};
use crate::name::{Maker, Name, NameKind, ShmDir};
use crate::os::file;
use crate::process::pid_namespace;
use crate::refcount;
use nix::errno::Errno;

/// What a sweep found among the names of its prefix.
#[derive(Debug, Default)]
pub struct Swept {
    /// Names that were removed.
    pub removed: Vec<Name>,
    /// Names in use: their maker, or a holder, lives.
    pub live: usize,
    /// Names made in another pid namespace, whose processes cannot be told from here.
    pub foreign: usize,
    /// Labelled plain maps: nothing tells whose they are.
    pub unowned: usize,
    /// Names that could not be judged or removed, and why.
    pub failed: Vec<(Name, Error)>,
}

/// Removes the names in `dir`, of its prefix, whose process is gone: unique names of plain maps
/// whose maker is dead, and reference-counted maps that no living process holds.
///
/// Bytes that are still mapped somewhere stay; only names go. Safe to run at any time, in any
/// number of processes at once. Good moments are the start of a job, and after a child was killed.
///
/// # Errors
///
/// [`Error::Os`] if the directory cannot be read; single names that fail are in the report.
pub fn sweep(dir: &ShmDir) -> Result<Swept> {
    let here = pid_namespace()?;
    let mut swept = Swept::default();
    let unreadable = |error| Error::os("read", &dir.path().display(), file::errno(error));
    for entry in std::fs::read_dir(dir.path()).map_err(unreadable)? {
        let file_name = entry.map_err(unreadable)?.file_name();
        let Some(name) = file_name.to_str().and_then(|text| dir.parse(text)) else { continue };
        match judge(dir, &name, here) {
            Ok(Verdict::Removed) => swept.removed.push(name),
            Ok(Verdict::Live) => swept.live += 1,
            Ok(Verdict::Foreign) | Err(Error::Namespace { .. }) => swept.foreign += 1,
            Ok(Verdict::Unowned) => swept.unowned += 1,
            Err(error) => swept.failed.push((name, error)),
        }
    }
    Ok(swept)
}

enum Verdict {
    Removed,
    Live,
    Foreign,
    Unowned,
}

fn judge(dir: &ShmDir, name: &Name, here: u32) -> Result<Verdict> {
    match (name.kind(), name.maker()) {
        (NameKind::Counted, _) => {
            let removed = refcount::reap(dir, name)?;
            Ok(if removed { Verdict::Removed } else { Verdict::Live })
        }
        (NameKind::Plain, None) => Ok(Verdict::Unowned),
        (NameKind::Plain, Some(Maker { pid_namespace, .. })) if pid_namespace != here => {
            Ok(Verdict::Foreign)
        }
        (NameKind::Plain, Some(maker)) if maker.process.is_alive()? => Ok(Verdict::Live),
        // The name is unique and its maker dead, so nobody makes it anew behind our back.
        (NameKind::Plain, Some(_)) => {
            let path = dir.path_of(name);
            file::remove(&path)
                .map(|()| Verdict::Removed)
                .map_err(|errno: Errno| Error::os("remove", &path.display(), errno))
        }
    }
}
