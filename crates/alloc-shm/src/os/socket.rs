//! Unix sockets that keep message boundaries, and the descriptors that travel on them.
#![allow(unsafe_code, reason = "takes ownership of received descriptors")]

use crate::os::file::errno;
use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::socket::{
    AddressFamily, Backlog, ControlMessage, MsgFlags, SockFlag, SockType, UnixAddr, sockopt,
};
use std::io::IoSlice;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Errno>;

/// The most descriptors the kernel lets one message carry (`SCM_MAX_FD`).
const DESCRIPTORS_MAX: usize = 253;

/// What one receive brought. Descriptors that nobody takes are closed on drop.
#[derive(Debug)]
pub(crate) struct Packet {
    /// Bytes written into the buffer.
    pub(crate) len: usize,
    /// The message was longer than the buffer.
    pub(crate) truncated: bool,
    pub(crate) descriptors: Vec<OwnedFd>,
    /// Descriptors were sent that this process could not take, for want of free ones.
    pub(crate) descriptors_lost: bool,
}

pub(crate) fn pair() -> Result<(OwnedFd, OwnedFd)> {
    nix::sys::socket::socketpair(
        AddressFamily::Unix,
        SockType::SeqPacket,
        None,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
    )
}

fn new_socket() -> Result<OwnedFd> {
    nix::sys::socket::socket(
        AddressFamily::Unix,
        SockType::SeqPacket,
        SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK,
        None,
    )
}

pub(crate) fn listen(address: &UnixAddr) -> Result<OwnedFd> {
    let socket = new_socket()?;
    nix::sys::socket::bind(socket.as_raw_fd(), address)?;
    nix::sys::socket::listen(&socket, Backlog::MAXCONN)?;
    Ok(socket)
}

pub(crate) fn connect(address: &UnixAddr) -> Result<OwnedFd> {
    let socket = new_socket()?;
    nix::sys::socket::connect(socket.as_raw_fd(), address)?;
    Ok(socket)
}

/// The next waiting connection; `EAGAIN` if there is none.
pub(crate) fn accept(listener: BorrowedFd<'_>) -> Result<OwnedFd> {
    nix::sys::socket::accept4(listener, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK)
}

/// Makes a socket that came from elsewhere non-blocking, after checking that it keeps message
/// boundaries.
pub(crate) fn adopt(socket: BorrowedFd<'_>) -> Result<()> {
    let kind = nix::sys::socket::getsockopt(&socket, sockopt::SockType)?;
    if kind != SockType::SeqPacket {
        return Err(Errno::EPROTOTYPE);
    }
    let flags = nix::fcntl::fcntl(socket, nix::fcntl::FcntlArg::F_GETFL)?;
    let flags = nix::fcntl::OFlag::from_bits_retain(flags) | nix::fcntl::OFlag::O_NONBLOCK;
    nix::fcntl::fcntl(socket, nix::fcntl::FcntlArg::F_SETFL(flags)).map(drop)
}

/// The user the other end ran as when it connected.
pub(crate) fn peer_user(socket: BorrowedFd<'_>) -> Result<u32> {
    nix::sys::socket::getsockopt(&socket, sockopt::PeerCredentials).map(|peer| peer.uid())
}

/// Sends one message, whole or not at all; `EAGAIN` if the peer is behind, `EPIPE` if it is gone.
pub(crate) fn send(
    socket: BorrowedFd<'_>,
    bytes: &[u8],
    descriptor: Option<BorrowedFd<'_>>,
) -> Result<()> {
    let raw = descriptor.map(|fd| fd.as_raw_fd());
    let rights = raw.as_ref().map(|fd| ControlMessage::ScmRights(std::slice::from_ref(fd)));
    let sent = nix::sys::socket::sendmsg::<()>(
        socket.as_raw_fd(),
        &[IoSlice::new(bytes)],
        rights.as_slice(),
        MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT,
        None,
    )?;
    // A packet socket takes a message whole.
    if sent == bytes.len() { Ok(()) } else { Err(Errno::EMSGSIZE) }
}

/// Control data, aligned as the kernel wants it.
#[repr(C, align(8))]
struct Control([u8; CONTROL_LEN]);

/// Room for the descriptors of one message, and a header.
const CONTROL_LEN: usize = 64 + DESCRIPTORS_MAX * size_of::<RawFd>();

/// Receives one message; `EAGAIN` if there is none. An end of stream is a packet of length 0.
///
/// A peer that dies with unread messages of ours makes the kernel say `ECONNRESET` once, before it
/// hands out what the peer had sent: that is passed over, or those messages would be lost.
pub(crate) fn receive(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<Packet> {
    match receive_once(socket, buffer) {
        Err(Errno::ECONNRESET) => receive_once(socket, buffer),
        result => result,
    }
}

/// Written on libc, since nix keeps no hold of the descriptors that did arrive when the kernel
/// flags that others did not: they would leak.
fn receive_once(socket: BorrowedFd<'_>, buffer: &mut [u8]) -> Result<Packet> {
    let mut control = Control([0; CONTROL_LEN]);
    let mut part = libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() };
    // SAFETY: `msghdr` is plain data for which all zeroes is a valid, empty value.
    let mut header: libc::msghdr = unsafe { std::mem::zeroed() };
    header.msg_iov = &raw mut part;
    header.msg_iovlen = 1;
    header.msg_control = (&raw mut control).cast();
    header.msg_controllen = size_of::<Control>();
    let flags = libc::MSG_DONTWAIT | libc::MSG_CMSG_CLOEXEC;
    // SAFETY: the header points to one buffer and one control area, both alive, writable and as
    // long as it says.
    let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut header, flags) };
    let len = Errno::result(got)?;
    Ok(Packet {
        len: len as usize,
        truncated: header.msg_flags & libc::MSG_TRUNC != 0,
        descriptors: take_descriptors(&header),
        descriptors_lost: header.msg_flags & libc::MSG_CTRUNC != 0,
    })
}

/// Takes every descriptor in the control area of a received message.
fn take_descriptors(header: &libc::msghdr) -> Vec<OwnedFd> {
    let mut taken = Vec::new();
    // SAFETY: the kernel filled in `header`, whose control area is alive.
    let mut next = unsafe { libc::CMSG_FIRSTHDR(header) };
    while !next.is_null() {
        // SAFETY: not null, so it points to a whole control header within the control area.
        let message = unsafe { *next };
        if message.cmsg_level == libc::SOL_SOCKET && message.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: the data of a control message follows its header.
            let data = unsafe { libc::CMSG_DATA(next) }.cast::<RawFd>();
            let bytes = message.cmsg_len - header_len();
            for i in 0..bytes / size_of::<RawFd>() {
                // SAFETY: within the data of this control message.
                let at = unsafe { data.add(i) };
                // SAFETY: holds a descriptor number; control data need not be aligned for it.
                let raw = unsafe { at.read_unaligned() };
                // SAFETY: the kernel has just made this descriptor for us; nobody else has it.
                taken.push(unsafe { OwnedFd::from_raw_fd(raw) });
            }
        }
        // SAFETY: `next` is a control header within the control area of `header`.
        next = unsafe { libc::CMSG_NXTHDR(header, next) };
    }
    taken
}

fn header_len() -> usize {
    // SAFETY: computes a length from a length; touches no memory.
    (unsafe { libc::CMSG_LEN(0) }) as usize
}

/// What a socket is ready for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ready {
    Readable,
    Writable,
    TimedOut,
}

/// Waits until something can be read (the end of the stream counts), or written where `write` asks
/// for it. Reading goes first.
pub(crate) fn wait(
    socket: BorrowedFd<'_>,
    write: bool,
    deadline: Option<Instant>,
) -> Result<Ready> {
    let interest = if write { PollFlags::POLLIN | PollFlags::POLLOUT } else { PollFlags::POLLIN };
    loop {
        let mut fds = [PollFd::new(socket, interest)];
        match nix::poll::poll(&mut fds, timeout(deadline)) {
            Err(Errno::EINTR) => continue,
            Err(error) => return Err(error),
            Ok(0) => match deadline {
                Some(deadline) if Instant::now() < deadline => continue,
                _ => return Ok(Ready::TimedOut),
            },
            Ok(_) => {}
        }
        let found = fds[0].revents().unwrap_or(PollFlags::POLLERR);
        if found == PollFlags::POLLOUT {
            return Ok(Ready::Writable);
        }
        return Ok(Ready::Readable);
    }
}

/// The time left, rounded up to what `poll` can wait.
pub(crate) fn timeout(deadline: Option<Instant>) -> PollTimeout {
    match deadline {
        None => PollTimeout::NONE,
        Some(deadline) => {
            let left = deadline.saturating_duration_since(Instant::now());
            let millis = (left + Duration::from_micros(999)).as_millis();
            PollTimeout::try_from(millis.min(i32::MAX as u128)).unwrap_or(PollTimeout::MAX)
        }
    }
}

/// Takes the descriptor that a parent process put into standard input, which is `/dev/null` from
/// then on: a second descriptor of a socket would hide its end from the peer.
pub(crate) fn take_standard_input() -> Result<OwnedFd> {
    let taken = std::io::stdin().as_fd().try_clone_to_owned().map_err(errno)?;
    let null = std::fs::File::open("/dev/null").map_err(errno)?;
    nix::unistd::dup2_stdin(&null)?;
    Ok(taken)
}
