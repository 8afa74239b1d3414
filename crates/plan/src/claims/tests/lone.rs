//! The network of claims without a virtual machine.

use super::*;

#[test]
fn a_claim_without_a_machine_is_resolved_by_its_config_name() {
    let lone = claim("x", None);
    let blue = (NadRef::new("ns", "a"), config("blue", patchbay("blue")));
    let other = (NadRef::new("ns", "b"), config("blue", patchbay("red")));
    let off = (NadRef::new("ns", "c"), NadNetwork { persistent: false, ..config("blue", patchbay("red")) });
    let resolve = |nads: &[&(NadRef, NadNetwork)], reserved: Option<&ReservedIn>| {
        let nads: Vec<_> = nads.iter().map(|(at, config)| (at.clone(), config)).collect();
        resolve::for_lone(&lone, &nads, &|name| Some(format!("uid-{name}")), reserved)
    };
    let is_blue = |resolution: Resolution| matches!(resolution, Resolution::Allocate { network, .. } if network == "uid-blue");
    assert!(is_blue(resolve(&[&blue, &off], None)));
    let text = |resolution| match resolution {
        Resolution::Failed { message, .. } => message,
        other => panic!("{other:?}"),
    };
    assert_eq!(
        text(resolve(&[&blue, &other], None)),
        r#"NADs ns/a (network blue) and ns/b (network red) both have the config name "blue"; give one of them another name"#
    );
    assert_eq!(
        text(resolve(&[&off], None)),
        r#"no NetworkAttachmentDefinition of namespace ns with patchbay-ipam and allowPersistentIPs has the config name "blue"; create one, or correct spec.network of the IPAMClaim"#
    );
    let reserved = ReservedIn { network: "uid-blue".to_owned(), network_name: "blue".to_owned() };
    assert!(is_blue(resolve(&[&blue, &other], Some(&reserved))), "a second NAD takes no address away");
    let ovn = (NadRef::new("ns", "d"), config("blue", NadIpam::Ovn));
    assert_eq!(resolve(&[&ovn], None), Resolution::NotOurs);
    assert!(is_blue(resolve(&[&blue, &ovn], Some(&reserved))));
    let report =
        |resolution: Resolution| resolution.failure().map(|(failure, report)| (failure.message, report));
    for nads in [&[&ovn, &blue][..], &[&blue, &other, &ovn]] {
        let message = r#"NADs ns/a (network blue) and ns/d (OVN-Kubernetes) both have the config name "blue"; give one of them another name"#;
        let expected = (message.to_owned(), FailureReport::Event);
        assert_eq!(report(resolve(nads, None)), Some(expected), "OVN-Kubernetes writes the status");
    }
    let of = |resolution| report(resolution).map(|(_, report)| report);
    assert_eq!(of(resolve(&[], None)), Some(FailureReport::Event), "the claim may be for another IPAM");
    assert_eq!(of(resolve(&[&off], None)), Some(FailureReport::Status));
    assert_eq!(of(resolve(&[&blue, &other], None)), Some(FailureReport::Status));
    let mut served = claim("x", None);
    served.status.ips = vec!["10.9.0.3/24".to_owned()];
    assert_eq!(resolve::for_lone(&served, &[], &|_| None, None), Resolution::NotOurs);
}
