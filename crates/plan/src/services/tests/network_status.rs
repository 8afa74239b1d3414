//! S5: texts of the network-status annotation, as different programs and users write them.

use super::fixtures::NAMESPACE;
use crate::services::{InterfaceFault, PodInterface, interfaces};

/// What a text means for the network `shop/blue`: each interface with its addresses and the number of its faults, or a part
/// of the error.
type Expected = Result<&'static [(&'static str, &'static [&'static str], usize)], &'static str>;

const TEXTS: [(&str, Expected); 24] = [
    ("", Ok(&[])),
    ("[]", Ok(&[])),
    // As Multus writes it, with the default network first.
    (
        r#"[{"name":"cbr0","interface":"eth0","ips":["10.244.1.5"],"mac":"aa:bb:cc:dd:ee:01","default":true,"dns":{}},
            {"name":"shop/blue","interface":"net1","ips":["10.1.0.5","fd00::5"],"mac":"02:00:00:00:00:01","dns":{}}]"#,
        Ok(&[("net1", &["10.1.0.5", "fd00::5"], 0)]),
    ),
    // A bare name is in the namespace of the pod.
    (r#"[{"name":"blue","interface":"net1","ips":["10.1.0.5"]}]"#, Ok(&[("net1", &["10.1.0.5"], 0)])),
    (r#"[{"name":"other/blue","interface":"net1","ips":["10.1.0.5"]}]"#, Ok(&[])),
    (r#"[{"name":"shop/blues","interface":"net1","ips":["10.1.0.5"]}]"#, Ok(&[])),
    // A NAD as default network: its addresses are primary ones.
    (r#"[{"name":"shop/blue","interface":"eth0","ips":["10.1.0.5"],"default":true}]"#, Ok(&[])),
    // A plugin without addresses.
    (r#"[{"name":"shop/blue","interface":"net1"}]"#, Ok(&[("net1", &[], 0)])),
    (r#"[{"name":"shop/blue","interface":"net1","ips":null,"dns":null}]"#, Ok(&[("net1", &[], 0)])),
    // The same NAD twice, or a plugin with two interfaces.
    (
        r#"[{"name":"shop/blue","interface":"net1","ips":["10.1.0.5"]},{"name":"shop/blue","interface":"net2","ips":["10.1.0.6"]}]"#,
        Ok(&[("net1", &["10.1.0.5"], 0), ("net2", &["10.1.0.6"], 0)]),
    ),
    // Unknown keys, and known ones that do not matter here.
    (
        r#"[{"name":"shop/blue","interface":"net1","ips":["10.1.0.5"],"later":{"a":[1]},"mtu":"big","dns":7}]"#,
        Ok(&[("net1", &["10.1.0.5"], 0)]),
    ),
    (r#"[{"name":"shop/blue","ips":["10.1.0.5"]}]"#, Ok(&[("", &["10.1.0.5"], 0)])),
    // R14: canonical text, and no prefix length.
    (
        r#"[{"name":"shop/blue","ips":["FD00:0:0::0005","10.1.0.5/24","010.1.0.5"]}]"#,
        Ok(&[("", &["fd00::5"], 2)]),
    ),
    (
        r#"[{"name":"shop/blue","ips":["10.1.0.5","10.1.0.5","fd00::5","fd00:0::5"]}]"#,
        Ok(&[("", &["10.1.0.5", "fd00::5"], 0)]),
    ),
    // R15: what the API server refuses in a slice.
    (
        r#"[{"name":"shop/blue","ips":["0.0.0.0","127.0.0.1","169.254.7.7","224.0.0.5","255.255.255.255","10.1.0.5"]}]"#,
        Ok(&[("", &["10.1.0.5"], 5)]),
    ),
    (
        r#"[{"name":"shop/blue","ips":["::","::1","fe80::1","fe80::1%net1","ff02::1","::ffff:10.1.0.5","fd00::5"]}]"#,
        Ok(&[("", &["fd00::5"], 6)]),
    ),
    (r#"[{"name":"shop/blue","ips":["",7,null,"host"]}]"#, Ok(&[("", &[], 4)])),
    // A wrong type in one entry does not hide the others.
    (
        r#"[{"name":"shop/blue","interface":"net1","ips":"10.1.0.5"},{"name":"blue","interface":"net2","ips":["10.1.0.6"]}]"#,
        Ok(&[("net1", &[], 1), ("net2", &["10.1.0.6"], 0)]),
    ),
    (r#"[{"name":"shop/blue","ips":["10.1.0.5"],"default":"true"}]"#, Ok(&[("", &[], 1)])),
    (r#"[{"interface":"net1","ips":["10.1.0.5"]}]"#, Ok(&[])),
    (r#"[{"name":7,"ips":["10.1.0.5"]}]"#, Err("element [0]")),
    (r#"[{"name":"shop/blue","ips":["10.1.0.5"]},["shop/blue"]]"#, Err("element [1]")),
    (r#"{"name":"shop/blue","ips":["10.1.0.5"]}"#, Err("is not a JSON list")),
    (r#"[{"name":"shop/blue","ips":["10.1.0.5"]}"#, Err("is not a JSON list")),
];

#[test]
fn s5_r14_r15_every_text_gives_the_addresses_of_the_network_and_no_other() {
    for (text, expected) in TEXTS {
        let found = interfaces(Some(text), NAMESPACE);
        match (found, expected) {
            (Ok(found), Ok(expected)) => {
                let of_blue = found.iter().filter(|one| one.nad.to_string() == "shop/blue");
                let texts =
                    |one: &PodInterface| one.addresses.iter().map(ToString::to_string).collect::<Vec<_>>();
                let found: Vec<_> =
                    of_blue.map(|one| (one.interface.to_string(), texts(one), one.faults.len())).collect();
                let expected: Vec<_> = expected
                    .iter()
                    .map(|(name, ips, faults)| {
                        (name.to_string(), ips.iter().map(ToString::to_string).collect::<Vec<_>>(), *faults)
                    })
                    .collect();
                assert_eq!(found, expected, "{text}");
            }
            (Err(error), Err(expected)) => assert!(error.contains(expected), "{text}: {error}"),
            (found, _) => panic!("{text}: {found:?}"),
        }
    }
    assert_eq!(interfaces(None, NAMESPACE), Ok(Box::default()));
}

#[test]
fn s5_deeply_nested_and_long_texts_are_faults_and_no_crash() {
    let nested = format!("[{}", "[".repeat(100_000));
    assert!(interfaces(Some(&nested), NAMESPACE).is_err());
    let long = format!(r#"[{{"name":"shop/blue","ips":["{}"]}}]"#, "x".repeat(100_000));
    let found = interfaces(Some(&long), NAMESPACE).unwrap();
    let InterfaceFault::Address(fault) = &found[0].faults[0] else { panic!("{found:?}") };
    assert!(fault.len() < 100, "{}", fault.len());
}

#[test]
fn s5_an_annotation_cannot_publish_any_number_of_addresses_or_faults() {
    let ips: Vec<String> = (0..20_000).map(|n| format!("10.1.{}.{}", n / 256, n % 256)).collect();
    let entry = |ips: &[String]| serde_json::json!({"name": "blue", "interface": "net1", "ips": ips});
    let text = serde_json::json!([entry(&ips), entry(&ips)]).to_string();
    let found = interfaces(Some(&text), NAMESPACE).unwrap();
    assert_eq!(found.iter().map(|one| one.addresses.len()).sum::<usize>(), 128);
    assert_eq!(found.iter().map(|one| one.faults.len()).sum::<usize>(), 2);
    let InterfaceFault::Address(fault) = &found[0].faults[0] else { panic!("{found:?}") };
    assert_eq!(&**fault, "the rest (only 128 addresses of a pod are published)");
    let text = serde_json::json!([entry(&vec!["bad".to_owned(); 20_000])]).to_string();
    assert_eq!(interfaces(Some(&text), NAMESPACE).unwrap()[0].faults.len(), 8);
    let text = serde_json::json!(vec![entry(&[]); 257]).to_string();
    let error = interfaces(Some(&text), NAMESPACE).unwrap_err();
    assert_eq!(&*error, "k8s.v1.cni.cncf.io/network-status has more than 256 elements");
    let text = serde_json::json!(vec![entry(&[]); 256]).to_string();
    assert!(interfaces(Some(&text), NAMESPACE).is_ok());
}
