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

/// What the aliases of all host ends begin with that were made for one configuration: a runtime that collects what is
/// left speaks of one, and others may lead to the same network.
pub fn alias_of_config(network_uid: &str, config: &str) -> String {
    let config: String = config.chars().map(|c| if c == '/' { '_' } else { readable(c) }).take(64).collect();
    format!("{ALIAS}{network_uid}/{config}/")
}

fn readable(c: char) -> char {
    if c.is_ascii_graphic() && c != '\\' { c } else { '_' }
}

/// The alias of the host's end, cut where the kernel would refuse it, and readable whatever the runtime says.
pub fn alias(network_uid: &str, config: &str, container_id: &str, ifname: &str) -> String {
    let whose = format!("{container_id}/{ifname}");
    let begin = alias_of_config(network_uid, config);
    begin.chars().chain(whose.chars().map(readable)).take(LONGEST_ALIAS).collect()
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
        assert_eq!(alias("u", "blue", "c", "net1"), "pod/u/blue/c/net1");
        assert_eq!(alias_of_config("u", "a/../b c"), "pod/u/a_.._b_c/");
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
            prop_assert!(alias("u", &id, &id, &ifname).bytes().take(LONGEST_ALIAS + 1).all(|b| b.is_ascii_graphic()));
        }
    }
}
