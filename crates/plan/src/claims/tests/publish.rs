//! The status of claims.

use api::{Condition, ConditionStatus, ipamclaim::AllocationReason};

use super::{
    super::{publish, resolve},
    *,
};
use crate::ipam::AddressInfo;

fn reserved(addresses: &[&str]) -> Reserved {
    let info = |text: &&str| AddressInfo { net: text.parse().unwrap(), gateway: None };
    let blocks = addresses.iter().map(|text| if text.contains(':') { "b6" } else { "b4" }.to_owned());
    Reserved { infos: addresses.iter().map(info).collect(), blocks: blocks.collect(), outside: Vec::new() }
}

fn failed() -> Failure {
    Failure { reason: AllocationReason::SubnetExhausted, message: "full".to_owned() }
}

fn written(
    claim: &ClaimState,
    outcome: Result<&Reserved, &Failure>,
    pods: &[ClaimPod],
) -> Option<StatusWrite> {
    let pods: Vec<&ClaimPod> = pods.iter().collect();
    publish::status(claim, outcome, &pods, ClaimSchema::default(), at(100))
}

#[test]
fn addresses_are_published_with_the_condition_and_only_once() {
    let mut claim = claim("vm1.blue", Some(vm_owner("v1")));
    let foreign = Condition {
        r#type: "Other".to_owned(),
        status: ConditionStatus::True,
        reason: "X".to_owned(),
        message: String::new(),
        last_transition_time: at(1),
        observed_generation: None,
    };
    claim.status.conditions.push(foreign.clone());
    let both = reserved(&["10.0.0.4/24", "fd00::4/64"]);
    let write = written(&claim, Ok(&both), &[]).unwrap();
    assert!(!write.confirm);
    assert_eq!(write.status.ips, ["10.0.0.4/24", "fd00::4/64"]);
    assert_eq!(write.status.owner_pod, None);
    let condition = &write.status.conditions[1];
    assert_eq!(write.status.conditions[0], foreign);
    assert_eq!(
        (condition.status, condition.reason.as_str()),
        (ConditionStatus::True, "SuccessfulAllocation")
    );
    assert_eq!(condition.message, "10.0.0.4/24, fd00::4/64 are reserved in IPBlock b4, b6");
    claim.status = write.status;
    assert_eq!(written(&claim, Ok(&both), &[]), None);
}

#[test]
fn the_condition_names_addresses_that_no_subnet_has() {
    let claim = claim("vm1.blue", Some(vm_owner("v1")));
    let lost = Reserved { outside: vec![ip("10.0.0.4")], ..reserved(&["10.0.0.4/24"]) };
    let write = written(&claim, Ok(&lost), &[]).unwrap();
    let condition = &write.status.conditions[0];
    assert_eq!((condition.status, write.status.ips.len()), (ConditionStatus::True, 1));
    assert!(
        condition
            .message
            .contains("; the network has no subnet with 10.0.0.4 now, and the claim keeps what it has")
    );
}

#[test]
fn addresses_are_recorded_with_the_uid_of_the_claim() {
    let mut claim = restored("vm1.blue", &["10.0.0.4/24"]);
    assert!(claim.is_unused());
    let record = publish::record(&claim, &reserved(&["10.0.0.4/24"])).unwrap();
    assert_eq!(record.text(), r#"{"uid":"uid-vm1.blue","ips":["10.0.0.4/24"]}"#);
    assert_eq!(RecordedAddresses::read(&record.text()), Some(record.clone()));
    claim.annotations.recorded = Some(record);
    assert_eq!(publish::record(&claim, &reserved(&["10.0.0.4/24"])), None);
    assert!(!claim.is_unused());
    for forged in [
        "",
        "{}",
        r#"{"uid":"x","ips":["10.0.0.1/24","10.0.0.2/24"]}"#,
        r#"{"uid":"x","ips":["10.0.0.300/24"]}"#,
    ] {
        assert_eq!(RecordedAddresses::read(forged), None, "{forged}");
    }
}

#[test]
fn addresses_that_a_user_changed_are_restored_with_an_event() {
    let mut claim = claim("vm1.blue", Some(vm_owner("v1")));
    let both = reserved(&["10.0.0.4/24", "fd00::4/64"]);
    let first = written(&claim, Ok(&both), &[]).unwrap().status;
    assert_eq!(publish::restored(&claim, &first), None, "the first addresses");
    claim.status = first.clone();
    for ips in [&[][..], &["10.0.0.9/24"], &["10.0.0.4/24"]] {
        claim.status.ips = ips.iter().map(|ip| (*ip).to_owned()).collect();
        let write = written(&claim, Ok(&both), &[]).unwrap();
        assert_eq!(write.status, first);
        let event = publish::restored(&claim, &write.status).unwrap();
        assert!(event.warning && event.reason == "IPAMClaimConflict");
        assert_eq!(
            event.note,
            "status.ips of IPAMClaim ns/vm1.blue was changed, and is 10.0.0.4/24, fd00::4/64 again; for other addresses, \
             stop the VM and delete the IPAMClaim"
        );
    }
    // The condition says that the addresses are lost.
    claim.status = first;
    let lost = written(&claim, Err(&failed()), &[]).unwrap();
    assert_eq!(publish::restored(&claim, &lost.status), None);
}

#[test]
fn long_texts_of_users_are_cut() {
    let long = "ü".repeat(20_000);
    for (annotation, quoted) in [
        (serde_json::json!({"blue": [long]}), format!("\"{}…\" is not an IP address", "ü".repeat(64))),
        (serde_json::json!({"blue": [[long]]}), format!("[\"{}… is not a string", "ü".repeat(62))),
        (serde_json::json!({"blue": ["x"]}), "\"x\" is not an IP address".to_owned()),
    ] {
        let message = resolve::requested(Some(&annotation.to_string()), "blue").unwrap_err();
        assert_eq!(
            message,
            format!("annotation network.kubevirt.io/addresses: {quoted}; write {{\"blue\": [\"10.0.0.4\"]}}")
        );
    }
    let message = resolve::requested(Some(&format!(r#"{{"{long}": 1}}"#)), &long).unwrap_err();
    assert!(message.chars().count() < 300, "{message}");
    let claim = claim("vm1.blue", Some(vm_owner("v1")));
    for (length, expected) in [(1024, 1024), (1025, 1024), (40_000, 1024)] {
        let failure = Failure { message: "x".repeat(length), ..failed() };
        let write = written(&claim, Err(&failure), &[]).unwrap();
        assert_eq!(write.status.conditions[0].message.len(), expected);
    }
    let failure = Failure { message: long, ..failed() };
    let write = written(&claim, Err(&failure), &[]).unwrap();
    assert_eq!(write.status.conditions[0].message, "ü".repeat(510) + "…");
}

#[test]
fn what_takes_a_published_address_away_is_confirmed() {
    let mut claim = claim("vm1.blue", Some(vm_owner("v1")));
    let write = written(&claim, Err(&failed()), &[]).unwrap();
    assert_eq!((write.confirm, write.status.ips.len()), (false, 0));
    assert_eq!(write.status.conditions[0].reason, "SubnetExhausted");
    claim.status.ips = vec!["10.0.0.4/24".to_owned()];
    assert!(written(&claim, Err(&failed()), &[]).unwrap().confirm);
    assert!(written(&claim, Ok(&reserved(&["10.0.0.5/24"])), &[]).unwrap().confirm);
    assert!(!written(&claim, Ok(&reserved(&["10.0.0.4/24", "fd00::4/64"])), &[]).unwrap().confirm);
}

#[test]
fn fields_that_an_old_crd_drops_are_not_written() {
    let mut claim = claim("vm1.blue", Some(vm_owner("v1")));
    claim.status.ips = vec!["10.0.0.4/24".to_owned()];
    let none = ClaimSchema { conditions: false, owner_pod: false };
    let pod = showing(launcher("i1", &[("blue", Some("vm1.blue"))]), "p", &["10.0.0.4"]);
    let outcome = reserved(&["10.0.0.4/24"]);
    assert_eq!(publish::status(&claim, Ok(&outcome), &[&pod], none, at(0)), None);
}

#[test]
fn the_owner_pod_changes_only_when_another_pod_takes_over() {
    let pod = |name: &str, created: i64, shows: &[&str]| {
        let pod = launcher("i1", &[("blue", Some("vm1.blue"))]);
        ClaimPod { created: at(created), ..showing(pod, name, shows) }
    };
    let (both, one) = (["10.0.0.4", "fd00::4"], ["10.0.0.4"]);
    for (current, pods, expected) in [
        (None, vec![], None),
        (None, vec![pod("a", 1, &one)], None),
        (None, vec![pod("b", 2, &both), pod("a", 1, &both)], Some("a")),
        (Some("b"), vec![pod("b", 2, &both), pod("a", 1, &both)], Some("b")),
        (Some("b"), vec![pod("b", 2, &one), pod("a", 1, &both)], Some("a")),
        (Some("gone"), vec![], Some("gone")),
        (Some("gone"), vec![pod("a", 1, &one)], Some("gone")),
    ] {
        let mut claim = claim("vm1.blue", Some(vm_owner("v1")));
        claim.status.owner_pod = current.map(|name| api::ipamclaim::OwnerPod { name: name.to_owned() });
        let write = written(&claim, Ok(&reserved(&["10.0.0.4/24", "fd00::4/64"])), &pods).unwrap();
        assert_eq!(
            write.status.owner_pod.map(|pod| pod.name),
            expected.map(str::to_owned),
            "{current:?} {pods:?}"
        );
    }
}
