//! Which of several networks that want the same thing of a node gets it.
//!
//! The oldest does, and of two of one age the one whose name comes first. A network that loses one thing claims nothing
//! at all: what else it wanted is free for the next.

use std::{collections::BTreeMap, fmt};

use api::IfName;
use jiff::Timestamp;

use crate::bridge::{LocalNetwork, Overlay, Uid};

/// What one network wants of a node for itself alone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Claim {
    pub name: String,
    pub uid: Uid,
    pub created: Timestamp,
    pub bridge: IfName,
    /// The name of the VXLAN device, and what it is set to.
    pub vxlan: Option<(IfName, Overlay)>,
    pub uplink: Option<IfName>,
}

impl Claim {
    /// What a network wants of every node that it is on.
    pub fn of(network: &LocalNetwork) -> Self {
        Self {
            name: network.name.clone(),
            uid: network.uid.clone(),
            created: network.created,
            bridge: network.bridge.clone(),
            vxlan: network.overlay.map(|overlay| (network.vxlan.clone(), overlay)),
            uplink: network.uplink.clone(),
        }
    }
}

/// Why a network does not get what it wants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Clash {
    /// The name of the network that has it.
    pub winner: String,
    pub about: About,
}

/// What two networks both want.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum About {
    Bridge(IfName),
    Vxlan(IfName),
    Overlay(Overlay),
    Uplink(IfName),
    /// A link that one wants to make and the other has as its uplink.
    Link(IfName),
}

impl fmt::Display for Clash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.about {
            About::Bridge(name) => write!(f, "bridge {name}")?,
            About::Vxlan(name) => write!(f, "VXLAN device {name}")?,
            About::Overlay(Overlay { vni, port }) => write!(f, "VNI {vni} on port {port}")?,
            About::Uplink(name) => write!(f, "uplink {name}")?,
            About::Link(name) => write!(f, "link {name}")?,
        }
        write!(f, " belongs to BridgeNetwork {}, which is older", self.winner)
    }
}

/// The networks that do not get what they want, if all of these are on one node.
pub fn losers(claims: &[Claim]) -> BTreeMap<Uid, Clash> {
    let mut by_age: Vec<&Claim> = claims.iter().collect();
    by_age.sort_by_key(|claim| (claim.created, &claim.name, &claim.uid));
    let mut taken = Taken::default();
    let mut losers = BTreeMap::new();
    for claim in by_age {
        match taken.clash(claim) {
            Some(clash) => _ = losers.insert(claim.uid.clone(), clash),
            None => taken.take(claim),
        }
    }
    losers
}

/// What a link is to the network that has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    Bridge,
    Vxlan,
    Uplink,
}

/// What the older networks have.
#[derive(Default)]
struct Taken<'a> {
    links: BTreeMap<&'a IfName, (Role, &'a str)>,
    overlays: BTreeMap<Overlay, &'a str>,
}

impl<'a> Taken<'a> {
    fn clash(&self, claim: &Claim) -> Option<Clash> {
        let link = links(claim).find_map(|(name, role)| {
            let &(had, winner) = self.links.get(name)?;
            let about = match (role, had) {
                (Role::Bridge, Role::Bridge) => About::Bridge(name.clone()),
                (Role::Vxlan, Role::Vxlan) => About::Vxlan(name.clone()),
                (Role::Uplink, Role::Uplink) => About::Uplink(name.clone()),
                _ => About::Link(name.clone()),
            };
            Some(Clash { winner: winner.to_owned(), about })
        });
        link.or_else(|| {
            let (_, overlay) = claim.vxlan.as_ref()?;
            let winner = self.overlays.get(overlay)?;
            Some(Clash { winner: (*winner).to_owned(), about: About::Overlay(*overlay) })
        })
    }

    fn take(&mut self, claim: &'a Claim) {
        for (name, role) in links(claim) {
            self.links.entry(name).or_insert((role, &claim.name));
        }
        if let Some((_, overlay)) = &claim.vxlan {
            self.overlays.insert(*overlay, &claim.name);
        }
    }
}

fn links(claim: &Claim) -> impl Iterator<Item = (&IfName, Role)> {
    let vxlan = claim.vxlan.as_ref().map(|(name, _)| (name, Role::Vxlan));
    let uplink = claim.uplink.as_ref().map(|name| (name, Role::Uplink));
    [(&claim.bridge, Role::Bridge)].into_iter().chain(vxlan).chain(uplink)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn claim(name: &str, age: i64) -> Claim {
        Claim {
            name: name.to_owned(),
            uid: format!("uid-{name}"),
            created: Timestamp::from_second(1_000 - age).unwrap(),
            bridge: format!("br-{name}").parse().unwrap(),
            vxlan: None,
            uplink: None,
        }
    }

    fn vxlan(claim: Claim, vni: u32, port: u16) -> Claim {
        let name = format!("vx-{}", claim.name).parse().unwrap();
        Claim { vxlan: Some((name, Overlay { vni, port })), ..claim }
    }

    fn bridge(claim: Claim, name: &str) -> Claim {
        Claim { bridge: name.parse().unwrap(), ..claim }
    }

    fn uplink(claim: Claim, name: &str) -> Claim {
        Claim { uplink: Some(name.parse().unwrap()), ..claim }
    }

    /// Each loser with the sentence about it.
    fn told(claims: &[Claim]) -> Vec<(String, String)> {
        losers(claims).into_iter().map(|(uid, clash)| (uid, clash.to_string())).collect()
    }

    fn loser(uid: &str, sentence: &str) -> Vec<(String, String)> {
        vec![(uid.to_owned(), sentence.to_owned())]
    }

    #[test]
    fn networks_that_want_different_things_live_side_by_side() {
        let all = [
            vxlan(claim("a", 1), 1, 4789),
            vxlan(claim("b", 2), 1, 4790),
            vxlan(claim("c", 3), 2, 4789),
            uplink(claim("d", 4), "eth1"),
        ];
        assert_eq!(told(&all), []);
        assert_eq!(told(&[]), []);
    }

    #[test]
    fn the_oldest_wins_whatever_they_clash_about() {
        for (old, new, sentence) in [
            (
                bridge(claim("old", 9), "br0"),
                bridge(claim("new", 1), "br0"),
                "bridge br0 belongs to BridgeNetwork old, which is older",
            ),
            (
                vxlan(claim("old", 9), 7, 4789),
                vxlan(claim("new", 1), 7, 4789),
                "VNI 7 on port 4789 belongs to BridgeNetwork old, which is older",
            ),
            (
                uplink(claim("old", 9), "eth1"),
                uplink(claim("new", 1), "eth1"),
                "uplink eth1 belongs to BridgeNetwork old, which is older",
            ),
            (
                bridge(claim("old", 9), "eth1"),
                uplink(claim("new", 1), "eth1"),
                "link eth1 belongs to BridgeNetwork old, which is older",
            ),
            (
                uplink(claim("old", 9), "eth1"),
                bridge(claim("new", 1), "eth1"),
                "link eth1 belongs to BridgeNetwork old, which is older",
            ),
            (
                vxlan(claim("old", 9), 7, 4789),
                bridge(claim("new", 1), "vx-old"),
                "link vx-old belongs to BridgeNetwork old, which is older",
            ),
        ] {
            let wanted = loser("uid-new", sentence);
            assert_eq!(told(&[old.clone(), new.clone()]), wanted);
            assert_eq!(told(&[new, old]), wanted);
        }
    }

    #[test]
    fn of_two_of_one_age_the_first_by_name_wins() {
        let both = [bridge(claim("b", 1), "br0"), bridge(claim("a", 1), "br0")];
        assert_eq!(told(&both), loser("uid-b", "bridge br0 belongs to BridgeNetwork a, which is older"));
    }

    #[test]
    fn a_loser_claims_nothing() {
        let all = [
            bridge(claim("first", 9), "br0"),
            uplink(bridge(claim("second", 5), "br0"), "eth1"),
            uplink(claim("third", 1), "eth1"),
        ];
        assert_eq!(
            told(&all),
            loser("uid-second", "bridge br0 belongs to BridgeNetwork first, which is older")
        );
    }

    proptest! {
        #[test]
        fn no_two_winners_share_anything_and_order_does_not_matter(
            wanted in proptest::collection::vec((0..3_i64, 0..3_u8, 0..4_u8, 0..3_u32), 0..8),
            turn in 0..8_usize,
        ) {
            let mut claims: Vec<Claim> = wanted
                .into_iter()
                .enumerate()
                .map(|(n, (age, br, up, vni))| {
                    let claim = bridge(claim(&format!("n{n}"), age), &format!("l{br}"));
                    if up > 2 { vxlan(claim, vni, 4789) } else { uplink(claim, &format!("l{}", up + 2)) }
                })
                .collect();
            let lost = losers(&claims);
            let winners: Vec<&Claim> = claims.iter().filter(|claim| !lost.contains_key(&claim.uid)).collect();
            for (n, one) in winners.iter().enumerate() {
                for other in &winners[n + 1..] {
                    prop_assert!(links(one).all(|(name, _)| links(other).all(|(theirs, _)| name != theirs)));
                }
            }
            let first = claims.iter().min_by_key(|claim| (claim.created, &claim.name));
            prop_assert!(first.is_none_or(|first| !lost.contains_key(&first.uid)));
            let len = claims.len().max(1);
            claims.rotate_left(turn % len);
            prop_assert_eq!(losers(&claims), lost);
        }
    }
}
