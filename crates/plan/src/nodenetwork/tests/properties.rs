//! What holds for every state of the kernel.

use proptest::prelude::*;

use super::{publish::Publisher, *};

prop_compose! {
    fn any_address()(host in 0u8..4, bits in 8u8..=32, temporary in any::<bool>(), six in any::<bool>()) -> Address {
        let text = if six { format!("2001:db8::{host}/{bits}") } else { format!("10.0.0.{host}/{bits}") };
        Address { net: text.parse().unwrap(), temporary }
    }
}

prop_compose! {
    fn any_link()(
        index in 1u32..20,
        name in prop_oneof!["eth[0-3]", "veth[0-3]", "\\PC{0,15}"],
        kind in proptest::option::of("\\PC{0,80}"),
        mtu in any::<u32>(),
        up in any::<bool>(),
        loopback in any::<bool>(),
        master in proptest::option::of(1u32..20),
        alias in prop_oneof!["", "patchbay/x", "\\PC*"],
        addresses in proptest::collection::vec(any_address(), 0..5),
    ) -> Link {
        let admin = if up { AdminState::Up } else { AdminState::Down };
        let oper = if up { OperState::Up } else { OperState::Down };
        Link { name, kind, mac: None, mtu, admin, oper, loopback, master, alias, addresses, ..link(index, "") }
    }
}

prop_compose! {
    // Link indexes are unique.
    fn any_observed()(
        links in proptest::collection::btree_map(1u32..40, any_link(), 0..20),
        default_routes in proptest::collection::vec(1u32..40, 0..5),
    ) -> KernelState {
        let links = links.into_iter().map(|(index, link)| Link { index, ..link }).collect();
        KernelState { links, default_routes, ..KernelState::default() }
    }
}

fn shuffled(state: &KernelState, seed: &[usize]) -> KernelState {
    fn shuffle<T>(list: &mut [T], seed: &[usize]) {
        for (at, swap) in (0..list.len()).zip(seed.iter().cycle()) {
            list.swap(at, swap % list.len());
        }
    }
    let mut state = state.clone();
    shuffle(&mut state.links, seed);
    shuffle(&mut state.default_routes, seed);
    state.links.iter_mut().for_each(|link| shuffle(&mut link.addresses, seed));
    state
}

proptest! {
    #[test]
    fn the_status_does_not_depend_on_the_order_of_the_dump(
        state in any_observed(),
        seed in proptest::collection::vec(any::<usize>(), 1..20),
    ) {
        let node = node(&["10.0.0.2", "2001:db8::1"]);
        prop_assert_eq!(plan_status(&state, &node), plan_status(&shuffled(&state, &seed), &node));
    }

    #[test]
    fn the_status_respects_the_limits_of_the_schema(state in any_observed()) {
        let status = plan_status(&state, &node(&["10.0.0.2"]));
        let shown = names(&status);
        prop_assert!(shown.windows(2).all(|pair| pair[0] < pair[1]));
        prop_assert!(shown.iter().all(|name| (1..=MAX_INTERFACE_NAME).contains(&name.chars().count())));
        for interface in &status.interfaces {
            prop_assert!((1..=MAX_INTERFACE_NAME).contains(&interface.kind.chars().count()));
            prop_assert!(interface.mtu >= 0);
        }
    }

    #[test]
    fn nothing_is_left_to_write_after_a_write(state in any_observed()) {
        let mut publisher = Publisher::new();
        publisher.observed = state;
        publisher.write();
        prop_assert_eq!(publisher.publish(Instant::now()), PublishDecision::Nothing);
    }
}
