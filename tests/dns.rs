//! Queries of the cluster's DNS server by test pods.

use std::{collections::BTreeSet, net::IpAddr, time::Duration};

use anyhow::{Context as _, Result, ensure};
use lab::{test_namespace::TestNamespace, wait};

/// The domain of the lab's cluster.
const DOMAIN: &str = "cluster.local";
/// Answers lag behind EndpointSlices: up to 5 s in the cache of CoreDNS, and its TTL of 5 s.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// The type of a record with an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressRecord {
    A,
    Aaaa,
}

/// The content of an SRV record.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct SrvRecord {
    pub port: u16,
    pub target: String,
}

/// The full name of a Service of the test namespace, or of a name below it.
pub fn full_name(ns: &TestNamespace, name: &str) -> String {
    format!("{name}.{}.svc.{DOMAIN}", ns.namespace)
}

/// The addresses that a pod gets for a full name. None if the name does not exist.
pub fn resolve(ns: &TestNamespace, pod: &str, record: AddressRecord, name: &str) -> Result<BTreeSet<IpAddr>> {
    let kind = match record {
        AddressRecord::A => "-type=a",
        AddressRecord::Aaaa => "-type=aaaa",
    };
    let answer = query(ns, pod, kind, name)?;
    // The first part of the output names the server.
    let answer = answer.split_once("\n\n").map_or("", |(_, answer)| answer);
    let addresses = answer.lines().filter_map(|line| line.strip_prefix("Address: "));
    addresses.map(|text| text.trim().parse().with_context(|| format!("{text:?} in {answer}"))).collect()
}

/// The SRV records of a full name.
pub fn resolve_srv(ns: &TestNamespace, pod: &str, name: &str) -> Result<BTreeSet<SrvRecord>> {
    let answer = query(ns, pod, "-type=srv", name)?;
    let fields = answer.lines().filter_map(|line| line.split_once("service = ").map(|(_, rest)| rest));
    let record = |text: &str| {
        let mut words = text.split_whitespace().skip(2);
        let port = words.next()?.parse().ok()?;
        Some(SrvRecord { port, target: words.next()?.trim_end_matches('.').to_owned() })
    };
    fields.map(|text| record(text).with_context(|| format!("{text:?} in {answer}"))).collect()
}

/// The output of nslookup; empty if the name does not exist or has no such record.
fn query(ns: &TestNamespace, pod: &str, kind: &str, name: &str) -> Result<String> {
    match ns.exec(pod, &["nslookup", kind, &format!("{name}.")]) {
        Ok(text) => Ok(text),
        Err(error) if format!("{error:#}").contains("NXDOMAIN") => Ok(String::new()),
        Err(error) => Err(error),
    }
}

/// Waits until the answer for a full name is exactly these addresses.
pub async fn wait_resolved(
    ns: &TestNamespace,
    pod: &str,
    record: AddressRecord,
    name: &str,
    expected: &BTreeSet<IpAddr>,
) -> Result<()> {
    wait::until(ANSWER_TIMEOUT, &format!("{name} to have the {record:?} records {expected:?}"), || async {
        let found = resolve(ns, pod, record, name)?;
        ensure!(found == *expected, "{found:?}");
        Ok(Some(()))
    })
    .await
}

/// Waits until a full name has exactly these SRV records.
pub async fn wait_srv(
    ns: &TestNamespace,
    pod: &str,
    name: &str,
    expected: &BTreeSet<SrvRecord>,
) -> Result<()> {
    wait::until(ANSWER_TIMEOUT, &format!("{name} to have the SRV records {expected:?}"), || async {
        let found = resolve_srv(ns, pod, name)?;
        ensure!(found == *expected, "{found:?}");
        Ok(Some(()))
    })
    .await
}
