//! Where sockets listen, and who may connect.

use crate::error::{Error, Refusal, Result};
use crate::os::{file, socket};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::socket::UnixAddr;
use std::fmt;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// The address of a Unix socket.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum SocketAddress {
    /// A label in the abstract namespace: leaves nothing in any directory, and is gone with its
    /// listener. Visible in one network namespace.
    Abstract(String),
    /// A path, at most 107 bytes long. Put it into a directory that only its user may write.
    Path(PathBuf),
}

impl SocketAddress {
    fn to_unix(&self) -> Result<UnixAddr> {
        let address = match self {
            SocketAddress::Abstract(label) => UnixAddr::new_abstract(label.as_bytes()),
            SocketAddress::Path(path) => UnixAddr::new(path),
        };
        address.map_err(|_| Error::Name {
            name: self.to_string(),
            why: "a socket address is at most 107 bytes long, without zero bytes",
        })
    }
}

impl fmt::Display for SocketAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SocketAddress::Abstract(label) => write!(f, "@{label}"),
            SocketAddress::Path(path) => write!(f, "{}", path.display()),
        }
    }
}

/// A listening socket. Its path, if it has one, goes with it.
#[derive(Debug)]
pub(crate) struct Bound {
    socket: OwnedFd,
    path: Option<PathBuf>,
}

impl Bound {
    /// Listens at `address`. A path left behind by a listener that is dead is taken over.
    pub(crate) fn new(address: &SocketAddress) -> Result<Self> {
        let unix = address.to_unix()?;
        let failed = |errno| match errno {
            Errno::EADDRINUSE => Error::Exists { object: address.to_string() },
            errno => Error::os("listen at", address, errno),
        };
        let SocketAddress::Path(path) = address else {
            let socket = socket::listen(&unix).map_err(failed)?;
            return Ok(Bound { socket, path: None });
        };
        let _exclusive = lock_directory_of(path)?;
        if path.exists() && matches!(socket::connect(&unix), Err(Errno::ECONNREFUSED)) {
            file::remove(path).map_err(failed)?;
        }
        let socket = socket::listen(&unix).map_err(failed)?;
        Ok(Bound { socket, path: Some(path.clone()) })
    }

    /// The next waiting connection of this user; `None` if none is waiting.
    pub(crate) fn accept(&self) -> Result<Option<OwnedFd>> {
        match socket::accept(self.socket.as_fd()) {
            Ok(socket) => {
                check_peer(socket.as_fd())?;
                Ok(Some(socket))
            }
            Err(Errno::EAGAIN | Errno::EINTR | Errno::ECONNABORTED) => Ok(None),
            Err(errno) => Err(Error::os("accept on", "a listening socket", errno)),
        }
    }
}

impl AsFd for Bound {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // Nobody is left to tell, and the next listener takes a leftover over.
            let _ = file::remove(path);
        }
    }
}

/// Connects to a listener of the same user.
pub(crate) fn connect(address: &SocketAddress) -> Result<OwnedFd> {
    let socket = socket::connect(&address.to_unix()?).map_err(|errno| match errno {
        Errno::ECONNREFUSED => Error::NotFound { object: address.to_string() },
        errno => Error::os("connect to", address, errno),
    })?;
    check_peer(socket.as_fd())?;
    Ok(socket)
}

/// Refuses a peer that runs as another user.
pub(crate) fn check_peer(socket: BorrowedFd<'_>) -> Result<()> {
    let got = socket::peer_user(socket)
        .map_err(|errno| Error::os("read the credentials of", "a peer", errno))?;
    let expected = nix::unistd::geteuid().as_raw();
    if got == expected { Ok(()) } else { Err(Refusal::Credentials { got, expected }.into()) }
}

/// Keeps others from listening in the same directory while a stale path is replaced.
fn lock_directory_of(path: &Path) -> Result<Flock<std::fs::File>> {
    let directory = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    let failed = |errno| Error::os("lock", &directory.display(), errno);
    let open = std::fs::File::open(directory).map_err(|error| failed(file::errno(error)))?;
    Flock::lock(open, FlockArg::LockExclusive).map_err(|(_, errno)| failed(errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stale_path_is_taken_over_and_a_live_one_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let address = SocketAddress::Path(dir.path().join("socket"));
        let first = Bound::new(&address).unwrap();
        assert!(matches!(Bound::new(&address), Err(Error::Exists { .. })));
        // What a killed listener leaves: the path, and nobody behind it.
        let Bound { socket, .. } = &first;
        nix::sys::socket::shutdown(
            std::os::fd::AsRawFd::as_raw_fd(socket),
            nix::sys::socket::Shutdown::Both,
        )
        .unwrap();
        let leftover = dir.path().join("kept");
        std::fs::hard_link(dir.path().join("socket"), &leftover).unwrap();
        drop(first);
        std::fs::rename(&leftover, dir.path().join("socket")).unwrap();
        let second = Bound::new(&address).unwrap();
        assert!(connect(&address).is_ok());
        drop(second);
        assert!(!dir.path().join("socket").exists());
        assert!(matches!(connect(&address), Err(Error::NotFound { .. })));
    }

    #[test]
    fn long_addresses_are_an_error_and_not_cut() {
        let long = SocketAddress::Path("x".repeat(110).into());
        assert!(matches!(Bound::new(&long), Err(Error::Name { .. })));
        let long = SocketAddress::Abstract("x".repeat(110));
        assert!(matches!(connect(&long), Err(Error::Name { .. })));
    }
}
