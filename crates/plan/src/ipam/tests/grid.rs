//! Which blocks and addresses a network has.

use super::*;

/// Every allocatable address, in order.
fn all(grid: &BlockGrid) -> Vec<IpAddr> {
    let mut found = BTreeSet::new();
    for index in 0..grid.blocks() {
        let block = grid.block(index).unwrap();
        while let Some(one) = grid.free_in(block, None, |one| found.contains(&one)) {
            found.insert(one);
        }
    }
    found.into_iter().collect()
}

#[test]
fn the_block_length_follows_from_the_largest_subnet_unless_specified() {
    for (subnets, four, six) in [
        (&["10.0.0.0/8"][..], Some(26), None),
        (&["10.0.0.0/24"], Some(28), None),
        (&["10.0.0.0/28"], Some(30), None),
        (&["10.0.0.0/30"], Some(30), None),
        (&["10.0.0.0/31"], Some(31), None),
        (&["10.0.0.0/32"], Some(32), None),
        (&["10.0.0.0/30", "10.1.0.0/24"], Some(28), None),
        (&["fd00::/64"], None, Some(120)),
        (&["fd00::/112"], None, Some(120)),
        (&["fd00::/120"], None, Some(126)),
        (&["fd00::/127", "10.0.0.0/16"], Some(26), Some(127)),
        (&["fd00::/128"], None, Some(128)),
    ] {
        let ipam = ipam(subnets, &[], &[]);
        assert_eq!(Family::V4.block_length(&ipam), four, "{subnets:?}");
        assert_eq!(Family::V6.block_length(&ipam), six, "{subnets:?}");
    }
    let specified = IpamSpec {
        block_length: Some(BlockLength { ipv4: Some(29), ipv6: Some(118) }),
        ..ipam(&["10.0.0.0/24", "fd00::/120"], &[], &[])
    };
    assert_eq!(Family::V4.block_length(&specified), Some(29));
    assert_eq!(Family::V6.block_length(&specified), Some(120), "a block is no larger than the subnet");
}

#[test]
fn first_and_last_addresses_gateways_and_exclusions_are_not_allocated() {
    for (subnets, exclude, gateways, wanted) in [
        (&["10.0.0.0/30"][..], &[][..], &[][..], &["10.0.0.1", "10.0.0.2"][..]),
        (&["10.0.0.0/31"], &[], &[], &["10.0.0.0", "10.0.0.1"]),
        (&["10.0.0.7/32"], &[], &[], &["10.0.0.7"]),
        (&["10.0.0.0/29"], &["10.0.0.2/31"], &["10.0.0.6"], &["10.0.0.1", "10.0.0.4", "10.0.0.5"]),
        (&["10.0.0.0/30", "10.0.0.4/30"], &[], &[], &["10.0.0.1", "10.0.0.2", "10.0.0.5", "10.0.0.6"]),
        (&["10.0.0.0/30"], &["10.0.0.0/8"], &[], &[]),
        (&["fd00::/126"], &[], &["fd00::1"], &["fd00::2", "fd00::3"]),
        (&["fd00::/127"], &[], &[], &["fd00::", "fd00::1"]),
        (&["fd00::9/128"], &["fd00::8/128"], &[], &["fd00::9"]),
    ] {
        let grid = grid(&ipam(subnets, exclude, gateways));
        let wanted: Vec<IpAddr> = wanted.iter().map(|text| ip(text)).collect();
        assert_eq!(all(&grid), wanted, "{subnets:?} {exclude:?}");
        assert_eq!(grid.addresses(), wanted.len() as u128);
        assert!(wanted.iter().all(|one| grid.contains(*one)));
    }
}

#[test]
fn huge_subnets_are_not_scanned() {
    let one = grid(&ipam(&["fd00::/48"], &["fd00::/64"], &["fd00:0:0:1::1"]));
    assert_eq!(one.addresses(), (1 << 80) - (1 << 64) - 1);
    assert_eq!(one.blocks(), (1 << 72) - (1 << 56));
    assert_eq!(one.block(0), Some(net("fd00:0:0:1::/120")));
    assert_eq!(one.block(1 << 56), Some(net("fd00:0:0:2::/120")));
    let taken = |block: IpNet| block == net("fd00:0:0:1::/120");
    assert_eq!(one.free_block(one.blocks() * 7, taken), Some(net("fd00:0:0:1::100/120")));
    assert_eq!(grid(&ipam(&["::/0"], &[], &[])).addresses(), u128::MAX);
    assert_eq!(grid(&ipam(&["0.0.0.0/0"], &[], &[])).addresses(), (1 << 32) - 2);
}

#[test]
fn a_search_continues_after_the_last_one_and_wraps_around() {
    let grid = grid(&ipam(&["10.0.0.0/28"], &[], &[]));
    let block = net("10.0.0.4/30");
    assert_eq!(grid.free_in(block, Some(ip("10.0.0.6")), |_| false), Some(ip("10.0.0.6")));
    assert_eq!(grid.free_in(block, Some(ip("10.0.0.9")), |_| false), Some(ip("10.0.0.7")));
    let taken = |one: IpAddr| one >= ip("10.0.0.6");
    assert_eq!(grid.free_in(block, Some(ip("10.0.0.6")), taken), Some(ip("10.0.0.4")));
    assert_eq!(grid.free_in(block, None, |_| true), None);
    assert_eq!(grid.free_in(net("10.9.0.0/30"), None, |_| false), None);
    let spans: Vec<_> = grid.free_spans(net("10.0.0.0/28"), |one| one == ip("10.0.0.3")).collect();
    assert_eq!(spans, [(ip("10.0.0.1"), ip("10.0.0.2")), (ip("10.0.0.4"), ip("10.0.0.14"))]);
}
