//! The link of a sandbox to a network: its names and its address, all of which follow from whose it is.
//!
//! The same call by the runtime gives the same names again, so a repeated one finds what the first one made.

use api::{IfName, Mac, digest::digest};

/// What the alias of a host end begins with.
pub const ALIAS: &str = "pod/";
/// The longest alias that the kernel takes, in bytes.
const LONGEST_ALIAS: usize = 255;

/// The name of the host's end of the pair.
pub fn host_end(container_id: &str, ifname: &str) -> Result<IfName, api::ifname::Error> {
    format!("veth{:011x}", digest([container_id, ifname]) >> 20).parse()
}

/// The address of the sandbox's end, if nobody asks for another: locally administered, of one station.
pub fn mac(container_id: &str, ifname: &str, network_uid: &str) -> Mac {
    let [_, _, mut octets @ ..] = digest(["mac", container_id, ifname, network_uid]).to_be_bytes();
    octets[0] = octets[0] & 0xfc | 0x02;
    Mac::from(octets)
}

/// What the aliases of all host ends of a network begin with.
pub fn alias_of_network(network_uid: &str) -> String {
    format!("{ALIAS}{network_uid}/")
}

/// The alias of the host's end, cut where the kernel would refuse it, and readable whatever the runtime says.
pub fn alias(network_uid: &str, container_id: &str, ifname: &str) -> String {
    let readable = |c: char| if c.is_ascii_graphic() && c != '\\' { c } else { '_' };
    let whose = format!("{container_id}/{ifname}");
    alias_of_network(network_uid).chars().chain(whose.chars().map(readable)).take(LONGEST_ALIAS).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_stay_as_they_are_for_ever() {
        assert_eq!(host_end("c", "net1").unwrap().as_str(), "vethd7ea65581f0");
        assert_eq!(mac("c", "net1", "u").to_string(), "b6:c3:ac:9a:ae:63");
        assert_eq!(alias("u", "c", "net1"), "pod/u/c/net1");
    }

    #[test]
    fn ten_thousand_sandboxes_have_ten_thousand_names() {
        let names: BTreeSet<_> = (0..10_000).map(|id| host_end(&id.to_string(), "net1").unwrap()).collect();
        assert_eq!(names.len(), 10_000);
    }

    proptest! {
        #[test]
        fn whatever_the_runtime_says_the_names_are_good(id in "\\PC{0,300}", ifname in "\\PC{0,20}") {
            prop_assert_eq!(host_end(&id, &ifname).unwrap().as_str().len(), IfName::MAX);
            prop_assert_eq!(mac(&id, &ifname, "u").octets()[0] & 3, 2);
            prop_assert!(alias("u", &id, &ifname).bytes().take(LONGEST_ALIAS + 1).all(|b| b.is_ascii_graphic()));
        }
    }
}
