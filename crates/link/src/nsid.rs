//! The IDs by which one network namespace refers to others.
//!
//! An ID holds no reference: the kernel destroys a namespace that only has an ID, and frees the ID.

use std::os::fd::{AsFd, AsRawFd as _};

use nix::errno::Errno;

use crate::{
    Error, message,
    netlink::Netlink,
    request::{CHANGE, NetlinkRequest},
};

pub const NEW_NSID: u16 = 88;
pub const DELETE_NSID: u16 = 89;
const GET_NSID: u16 = 90;
const NETNSA_NSID: u16 = 1;
const NETNSA_FD: u16 = 3;
/// `NETNSA_NSID_NOT_ASSIGNED`: in a request, the kernel chooses.
const NOT_ASSIGNED: i32 = -1;

/// The ID of a namespace in the namespace of the socket. None if it has none.
pub fn find(netlink: &mut Netlink, namespace: impl AsFd) -> Result<Option<i32>, Error> {
    let found =
        netlink.exchange("get the ID of the network namespace", request(GET_NSID, namespace), |reply| {
            (reply.kind == NEW_NSID).then(|| message::parse_nsid(reply.body))
        })?;
    Ok(found.flatten())
}

/// The ID of a namespace in the namespace of the socket. Assigns one if it has none.
pub fn find_or_assign(netlink: &mut Netlink, namespace: impl AsFd) -> Result<i32, Error> {
    if let Some(nsid) = find(netlink, &namespace)? {
        return Ok(nsid);
    }
    let assign = request(NEW_NSID, &namespace).attribute(NETNSA_NSID, &NOT_ASSIGNED.to_ne_bytes());
    match netlink.execute("assign an ID to the network namespace", assign) {
        // Assigned in between.
        Err(Error::Rejected { source, .. }) if source.raw_os_error() == Some(Errno::EEXIST as i32) => {}
        result => result?,
    }
    find(netlink, &namespace)?.ok_or(Error::NoNamespaceId)
}

fn request(kind: u16, namespace: impl AsFd) -> NetlinkRequest {
    let fd = namespace.as_fd().as_raw_fd();
    // `struct rtgenmsg`: the family.
    NetlinkRequest::new(kind, CHANGE, &[0]).attribute(NETNSA_FD, &fd.to_ne_bytes())
}
