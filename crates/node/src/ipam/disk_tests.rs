//! A disk that is full or read-only. These tests mount a small file system in a mount namespace of their own: run as root.

use std::{
    fs,
    time::{Duration, Instant},
};

use api::ipam::IpamSpec;
use futures::FutureExt as _;
use plan::ipam::{AttachmentKey, Lease, PodRef, Pool};
use wire::{
    cni::{Code, Error},
    socket::Request,
};

use super::{Ipam, JournalError, Metrics};
use crate::{
    cni::tombstone,
    store::small_disk::{SmallDisk, with_small_disk},
};

fn open(disk: &SmallDisk, boot: &str) -> Result<Ipam, JournalError> {
    let ipam = Ipam::open(disk.path(), boot, Metrics::default())?;
    Ok(ipam)
}

/// A network with a block of two addresses.
fn pool() -> Pool {
    let spec: IpamSpec = serde_json::from_str(r#"{"subnets": ["10.0.0.0/30"]}"#).unwrap();
    Pool::new("blue", &spec, |family| family.block_length(&spec), true)
}

/// A record of it does not fit into what is left of the journal's last page on a full disk.
fn key(container: &str) -> AttachmentKey {
    AttachmentKey { container: container.repeat(5000), interface: "net1".to_owned() }
}

fn add(ipam: &Ipam, container: &str) -> Result<Lease, Error> {
    let lease = Lease {
        key: key(container),
        pod: PodRef { namespace: "ns".to_owned(), name: container.to_owned(), uid: String::new() },
        network: "net".to_owned(),
        config: "blue".to_owned(),
        boot: ipam.boot().to_owned(),
        since: 1,
        addresses: Vec::new(),
        claim: None,
    };
    ipam.allocate_until(&pool(), lease, &[], Instant::now() + Duration::from_millis(200))
}

fn hold(ipam: &Ipam) {
    ipam.hold("net", "10.0.0.0/30");
}

#[test]
fn a_release_on_a_full_disk_succeeds_and_frees_the_address_once_it_is_written() {
    with_small_disk("full", |disk| {
        let ipam = open(disk, "boot").unwrap();
        hold(&ipam);
        let first = add(&ipam, "a").unwrap();
        add(&ipam, "b").unwrap();
        let mut repairs = ipam.repairs().subscribe();
        disk.fill();
        assert!(ipam.release(&key("a")));
        assert!(repairs.changed().now_or_never().is_none(), "the address is not free");
        assert_eq!(ipam.grant(&key("a")), None, "a released interface has nothing");
        assert_eq!(ipam.leases().len(), 2, "its address stays allocated");
        assert!(ipam.journal_problem().borrow().is_some());
        assert_eq!(ipam.status().unwrap_err().code, Code::NotAvailable);
        let refused = add(&ipam, "c").expect_err("no address is free");
        assert!(refused.msg.contains("cannot be recorded on this node"), "{refused:?}");
        assert!(ipam.save_pending().is_err());
        disk.empty();
        ipam.save_pending().unwrap();
        assert!(repairs.changed().now_or_never().is_some());
        assert_eq!((ipam.leases().len(), ipam.journal_problem().borrow().clone()), (1, None));
        assert_eq!(add(&ipam, "c").unwrap().addresses, first.addresses);
        assert!(ipam.release(&key("c")) && repairs.changed().now_or_never().is_some());
        assert_eq!(add(&ipam, "c").unwrap().addresses, first.addresses);
        drop(ipam);
        let again = open(disk, "boot").unwrap();
        assert_eq!((again.grant(&key("a")), again.leases().len()), (None, 2));
    });
}

#[test]
fn a_crash_before_the_release_is_written_leaves_the_address_allocated() {
    with_small_disk("crash", |disk| {
        let ipam = open(disk, "boot").unwrap();
        hold(&ipam);
        add(&ipam, "a").unwrap();
        disk.fill();
        ipam.release(&key("a"));
        drop(ipam);
        disk.empty();
        let again = open(disk, "boot").unwrap();
        assert_eq!(again.leases().len(), 1, "garbage collection releases it");
    });
}

#[test]
fn an_interface_that_is_added_again_keeps_its_address_though_its_release_was_not_written() {
    with_small_disk("again", |disk| {
        let ipam = open(disk, "boot").unwrap();
        hold(&ipam);
        let before = add(&ipam, "a").unwrap();
        disk.fill();
        ipam.release(&key("a"));
        let refused = add(&ipam, "a").unwrap_err();
        assert!(
            refused.msg.contains("cannot be recorded") && refused.msg.contains("free disk space"),
            "{refused:?}"
        );
        disk.empty();
        assert_eq!(add(&ipam, "a").unwrap().addresses, before.addresses);
        ipam.save_pending().unwrap();
        assert_eq!(ipam.leases().len(), 1, "the old release does not take the new lease");
        drop(ipam);
        assert_eq!(open(disk, "boot").unwrap().leases().len(), 1);
    });
}

#[test]
fn a_daemon_starts_on_a_full_or_read_only_disk_and_serves_releases() {
    with_small_disk("start", |disk| {
        let ipam = open(disk, "boot").unwrap();
        hold(&ipam);
        add(&ipam, "a").unwrap();
        add(&ipam, "b").unwrap();
        drop(ipam);
        let spoil: [fn(&SmallDisk); 2] = [SmallDisk::fill, |disk| disk.set_read_only(true)];
        let repair: [fn(&SmallDisk); 2] = [SmallDisk::empty, |disk| disk.set_read_only(false)];
        for (number, container) in ["a", "b"].into_iter().enumerate() {
            spoil[number](disk);
            let ipam = open(disk, "boot").unwrap();
            assert!(ipam.grant(&key(container)).is_some(), "what was recorded is known");
            assert!(ipam.journal_problem().borrow().is_some());
            assert!(ipam.release(&key(container)));
            assert!(ipam.save_pending().is_err());
            repair[number](disk);
            ipam.save_pending().unwrap();
            assert_eq!(ipam.leases().len(), 1 - number);
        }
    });
}

#[test]
fn a_boot_that_cannot_be_written_releases_addresses_only_once_it_is() {
    with_small_disk("boot", |disk| {
        let ipam = open(disk, "one").unwrap();
        hold(&ipam);
        add(&ipam, "a").unwrap();
        drop(ipam);
        disk.set_read_only(true);
        let ipam = open(disk, "two").unwrap();
        assert_eq!(ipam.leases().len(), 1);
        disk.set_read_only(false);
        ipam.save_pending().unwrap();
        assert_eq!(ipam.leases().len(), 0);
    });
}

#[test]
fn a_daemon_starts_on_a_read_only_disk_that_it_never_wrote_to() {
    with_small_disk("new", |disk| {
        disk.set_read_only(true);
        let ipam = open(disk, "boot").unwrap();
        assert!(ipam.journal_problem().borrow().is_some());
        assert!(ipam.release(&key("a")), "whether it has addresses is unknown");
        assert_eq!(ipam.require_loaded().unwrap_err().code, Code::TryAgainLater);
        let refused = add(&ipam, "a").unwrap_err();
        assert!(refused.msg.contains("cannot be recorded on this node"), "{refused:?}");
        disk.set_read_only(false);
        ipam.save_pending().unwrap();
        ipam.require_loaded().unwrap();
        hold(&ipam);
        assert!(add(&ipam, "a").is_ok());
    });
}

#[test]
fn a_read_only_disk_without_the_tombstone_of_an_interface_does_not_fail_its_add() {
    with_small_disk("tombstone", |disk| {
        let interface = |id: &str| Request { container_id: id.to_owned(), ..Request::default() };
        let (deleted, new) = (interface("deleted"), interface("new"));
        fs::write(disk.path().join(deleted.key()), deleted.encode().unwrap()).unwrap();
        disk.set_read_only(true);
        tombstone::remove(disk.path(), &new).unwrap();
        tombstone::remove(disk.path(), &deleted).unwrap_err();
        disk.set_read_only(false);
        tombstone::remove(disk.path(), &deleted).unwrap();
    });
}
