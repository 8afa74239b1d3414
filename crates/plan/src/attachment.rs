//! The names, alias and MAC address of the veth pair that attaches a pod sandbox to a network.
//!
//! All of them are derived from the container id and the interface name, so a repeated ADD finds the links of the first.

use api::{IfName, Mac, digest::digest};

/// The prefix of the alias of every host-side veth.
pub const POD_ALIAS_PREFIX: &str = "pod/";
/// The longest alias that the kernel accepts, in bytes.
const MAX_ALIAS_LEN: usize = 255;

/// The name of the host-side veth.
pub fn host_ifname(container_id: &str, ifname: &str) -> Result<IfName, api::ifname::Error> {
    format!("veth{:011x}", digest([container_id, ifname]) >> 20).parse()
}

/// The default MAC address of the sandbox-side veth: locally administered, unicast.
pub fn mac(container_id: &str, ifname: &str, network_uid: &str) -> Mac {
    let [_, _, mut octets @ ..] = digest(["mac", container_id, ifname, network_uid]).to_be_bytes();
    octets[0] = octets[0] & 0xfc | 0x02;
    Mac::from(octets)
}

/// The default MAC address of an attachment whose addresses an IPAMClaim has. It stays the same when the virtual machine
/// restarts.
pub fn claim_mac(claim_uid: &str) -> Mac {
    let [_, _, mut octets @ ..] = digest(["mac", "claim", claim_uid]).to_be_bytes();
    octets[0] = octets[0] & 0xfc | 0x02;
    Mac::from(octets)
}

/// The prefix of the aliases of all host-side veths of one network configuration. GC names one configuration, and several
/// configurations can attach to the same network.
pub fn alias_prefix(network_uid: &str, config: &str) -> String {
    let config: String = config.chars().map(|c| if c == '/' { '_' } else { printable(c) }).take(64).collect();
    format!("{POD_ALIAS_PREFIX}{network_uid}/{config}/")
}

fn printable(c: char) -> char {
    if c.is_ascii_graphic() && c != '\\' { c } else { '_' }
}

/// The alias of the host-side veth: printable, and truncated to what the kernel accepts.
pub fn alias(network_uid: &str, config: &str, container_id: &str, ifname: &str) -> String {
    let sandbox = format!("{container_id}/{ifname}");
    let prefix = alias_prefix(network_uid, config);
    prefix.chars().chain(sandbox.chars().map(printable)).take(MAX_ALIAS_LEN).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_never_change() {
        assert_eq!(host_ifname("c", "net1").unwrap().as_str(), "vethd7ea65581f0");
        assert_eq!(mac("c", "net1", "u").to_string(), "b6:c3:ac:9a:ae:63");
        assert_eq!(claim_mac("u").to_string(), "56:14:1c:fd:13:9e");
        assert_eq!(alias("u", "blue", "c", "net1"), "pod/u/blue/c/net1");
        assert_eq!(alias_prefix("u", "a/../b c"), "pod/u/a_.._b_c/");
    }

    #[test]
    fn ten_thousand_sandboxes_have_distinct_names() {
        let names: BTreeSet<_> =
            (0..10_000).map(|id| host_ifname(&id.to_string(), "net1").unwrap()).collect();
        assert_eq!(names.len(), 10_000);
    }

    proptest! {
        #[test]
        fn names_are_valid_for_any_input(id in "\\PC{0,300}", ifname in "\\PC{0,20}") {
            prop_assert_eq!(host_ifname(&id, &ifname).unwrap().as_str().len(), IfName::MAX);
            prop_assert_eq!(mac(&id, &ifname, "u").octets()[0] & 3, 2);
            prop_assert_eq!(claim_mac(&id).octets()[0] & 3, 2);
            prop_assert!(alias("u", &id, &id, &ifname).bytes().take(MAX_ALIAS_LEN + 1).all(|b| b.is_ascii_graphic()));
        }
    }
}
