//! A claim without a virtual machine serves one pod.

use super::*;

#[test]
fn a_claim_without_a_machine_serves_one_live_pod() {
    let serves = |pod: &str| {
        (
            ServeCode::Retry,
            format!(
                "IPAMClaim a/vm1.blue serves pod a/{pod} already; delete that pod, or give this one another claim"
            ),
        )
    };
    for (what, pod, others, first) in [
        ("alone", plain("p", 10), vec![], None),
        ("a later one waits", plain("p", 10), vec![plain("first", 5)], Some("first")),
        ("an older one is first", plain("p", 10), vec![plain("later", 15)], None),
        (
            "the pod that shows the address is first",
            plain("p", 10),
            vec![attached(plain("has", 15), Some("fd00::4")), plain("first", 5)],
            Some("has"),
        ),
        (
            "a repeated ADD of the pod that shows it",
            attached(plain("p", 10), Some("10.0.0.4")),
            vec![plain("first", 5)],
            None,
        ),
        (
            "an older pod that got the reference by hot-plug",
            plain("p", 10),
            vec![attached(plain("first", 5), None)],
            Some("first"),
        ),
        (
            "a younger pod that got the reference by hot-plug",
            plain("p", 10),
            vec![attached(plain("plugged", 15), None)],
            Some("plugged"),
        ),
        (
            "a hot-plug while a younger pod starts",
            attached(plain("p", 10), None),
            vec![plain("starts", 15)],
            Some("starts"),
        ),
        ("a hot-plug alone", attached(plain("p", 10), None), vec![], None),
        (
            "a pod that shows the address without a reference",
            plain("p", 10),
            vec![ClaimPod { elements: [].into(), ..attached(plain("has", 15), Some("10.0.0.4")) }],
            Some("has"),
        ),
        ("an unrelated pod", plain("p", 10), vec![ClaimPod { elements: [].into(), ..plain("web", 1) }], None),
        ("pods of one second", plain("p", 10), vec![plain("o", 10)], Some("o")),
    ] {
        for owner in [None, Some(owner(OwnerKind::Other, "set", "u"))] {
            let scene = Scene::with(|one| {
                one.claim().owner = owner.clone();
                (one.pod, one.vmi, one.others) = (pod.clone(), None, others.clone());
            });
            match first {
                None => assert!(!scene.shared(), "{what}"),
                Some(first) => assert_eq!(scene.refused(), serves(first), "{what}"),
            }
        }
    }
}

/// Whatever the pods look like, at most one of them is served, and all nodes agree on it.
#[test]
fn of_all_pods_with_a_claim_without_a_machine_at_most_one_is_served() {
    let kinds: [fn(ClaimPod) -> ClaimPod; 3] =
        [|pod| pod, |pod| attached(pod, None), |pod| attached(pod, Some("10.0.0.4"))];
    for number in 0..3_usize.pow(3) {
        let pods: Vec<ClaimPod> = (0..3)
            .map(|index| {
                let created = i64::try_from((index * 2 + number) % 5).unwrap();
                kinds[number / 3_usize.pow(u32::try_from(index).unwrap()) % 3](plain(
                    &format!("p{index}"),
                    created,
                ))
            })
            .collect();
        let served = pods.iter().filter(|pod| {
            let scene = Scene::with(|one| {
                one.claim().owner = None;
                (one.pod, one.vmi, one.others) = ((*pod).clone(), None, pods.clone());
            });
            scene.decide().is_ok()
        });
        // Nothing says in which order pods that do not show the address got it if one of them is hot-plugged.
        let shown = pods.iter().any(|pod| !pod.attached.is_empty());
        let is_certain = shown || pods.iter().all(|pod| !pod.has_status);
        assert_eq!(served.count(), usize::from(is_certain), "{pods:?}");
    }
}

/// The references appear one after another, and no network-status shows the address yet.
#[test]
fn a_claim_without_a_machine_is_not_served_twice_while_no_status_shows_it() {
    let states = [false, true];
    for (first_runs, second_runs) in states.into_iter().flat_map(|one| states.map(|two| (one, two))) {
        // A pod without a network-status has had its reference since it was created.
        for second_is_older in if second_runs { &[false, true][..] } else { &[false] } {
            let pod = |name: &str, created, runs| {
                let pod = plain(name, created);
                if runs { attached(pod, None) } else { pod }
            };
            let first = pod("first", 10, first_runs);
            let second = pod("second", if *second_is_older { 5 } else { 15 }, second_runs);
            let serve = |pod: &ClaimPod, others: &[&ClaimPod], known: Option<HeldClaim>| {
                let scene = Scene::with(|one| {
                    one.claim().owner = None;
                    (one.pod, one.vmi, one.known) = (pod.clone(), None, known);
                    one.others = others.iter().map(|pod| (*pod).clone()).collect();
                });
                scene.decide().map(|served| served.claim)
            };
            let what = format!("{first_runs} {second_runs} {second_is_older}");
            let held = serve(&first, &[&first], None).unwrap();
            serve(&second, &[&first, &second], None).expect_err(&what);
            assert_eq!(serve(&first, &[&first, &second], Some(held.clone())), Ok(held), "{what}");
        }
    }
}
