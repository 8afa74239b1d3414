//! Drops the record of an attachment without DEL, for an administrator who knows that DEL will never succeed.

use std::sync::Arc;

use api::ErrorChain;
use tokio::sync::Notify;
use tracing::warn;

use super::{journal::AttachmentJournal, multus_cache::MultusCacheReader, sandboxes::SandboxLocator};

/// Drops records. Clones drop those of the same journal.
#[derive(Clone)]
pub struct RecordDropper {
    pub(super) journal: AttachmentJournal,
    pub(super) locator: SandboxLocator,
    pub(super) recorded: MultusCacheReader,
    /// Wakes the workers.
    pub(super) dropped: Arc<Notify>,
}

impl RecordDropper {
    /// Drops the records of an interface of a pod, except those in use. Returns what was dropped, or why nothing was.
    pub async fn forget(&self, namespace: &str, pod: &str, interface: &str) -> Result<String, String> {
        let running = self.locator.list().await.map_err(|error| {
            let error = ErrorChain(&error).to_string();
            format!("it is not known which sandboxes run, so nothing is dropped: {error}; try again later\n")
        })?;
        let running = running.running_ids();
        let pods = self.journal.pods();
        let records = pods.iter().flat_map(|uid| self.journal.records_of(uid));
        let named = records.filter(|record| {
            (record.pod.namespace.as_str(), record.pod.name.as_str()) == (namespace, pod)
                && record.key.interface == interface
        });
        let (used, left): (Vec<_>, Vec<_>) = named.partition(|record| record.is_in_use(&running));
        if left.is_empty() && !used.is_empty() {
            return Err(format!(
                "interface {interface} of pod {namespace}/{pod} is in use; unplug it, or delete the pod\n"
            ));
        }
        if left.is_empty() {
            return Err(format!(
                "no record of interface {interface} of pod {namespace}/{pod} is on this node\n"
            ));
        }
        let mut lines = Vec::new();
        for record in left {
            let (network, container) = (record.nad.to_string(), record.key.container.as_str());
            // The daemon takes over the results of ended sandboxes that it has no record of.
            if let Err(error) = self.recorded.delete_result(&record).await {
                return Err(format!("{}nothing more is dropped: {}\n", lines.concat(), ErrorChain(&error)));
            }
            let written = self.journal.remove(record.key.clone()).await;
            warn!(
                pod = format!("{namespace}/{pod}"),
                interface, network, container, "dropped the record of an attachment without DEL"
            );
            lines.push(format!(
                "dropped interface {interface} of pod {namespace}/{pod} on network {network}, sandbox {container}: DEL does not \
                 run for it any more\n"
            ));
            if let Err(error) = written {
                lines.push(format!("a restart of the daemon brings it back: {error}\n"));
            }
        }
        self.dropped.notify_one();
        Ok(lines.concat())
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use api::selection::NadRef;
    use futures::FutureExt as _;
    use plan::hotplug::{AttachedRecord, AttachmentKey, AttachmentRecord, Origin, PodIdentity, RecordPhase};

    use super::*;
    use crate::{
        cri::tests::{FakeRuntime, HostRoot, sandbox},
        host_mounts::HostMounts,
        hotplug::config::MultusConfigReader,
    };

    fn dropper(journal: &AttachmentJournal, fake: &FakeRuntime, root: &Path) -> RecordDropper {
        let host = HostMounts::open(Path::new("/proc/self/ns/mnt")).unwrap();
        let multus = MultusConfigReader::at(host.clone(), root.to_owned());
        let results = root.join("results");
        RecordDropper {
            journal: journal.clone(),
            locator: SandboxLocator::new(fake.runtime(), host.clone()),
            recorded: MultusCacheReader::new(host, multus, results, "boot".to_owned()),
            dropped: Arc::default(),
        }
    }

    fn record(container: &str, interface: &str, removing: bool) -> AttachmentRecord {
        let uid = "uid-1".to_owned();
        AttachmentRecord {
            key: AttachmentKey { container: container.to_owned(), interface: interface.to_owned() },
            pod: PodIdentity {
                namespace: "shop".to_owned(),
                name: "web".to_owned(),
                uid: uid.clone(),
                runtime_uid: uid,
            },
            nad: NadRef::new("shop", "blue"),
            nad_guessed: false,
            origin: Origin::Hotplug,
            boot: "boot".to_owned(),
            netns: format!("/run/netns/{container}"),
            requested: None,
            config: r#"{"name":"blue","type":"veth"}"#.to_owned(),
            cni_args: Vec::new(),
            capability_args: serde_json::Map::new(),
            former_statuses: Vec::new(),
            removing,
            phase: RecordPhase::Attached(AttachedRecord::default()),
        }
    }

    #[tokio::test]
    async fn only_a_record_that_no_running_sandbox_uses_is_dropped() {
        let state = HostRoot::new("forget-state");
        let journal = AttachmentJournal::open(&state.0).unwrap();
        for record in [
            record("old", "net1", false),
            record("new", "net1", false),
            record("new", "net2", true),
            record("new", "net3", false),
        ] {
            journal.update(record).await.unwrap();
        }
        let fake = FakeRuntime::new("forget");
        fake.add(sandbox("new", "web", "uid-1", 0), "{}");
        fake.add(sandbox("old", "web", "uid-1", 1), "{}");
        let dropper = dropper(&journal, &fake, &state.0);
        let refused = dropper.forget("shop", "web", "net3").await.unwrap_err();
        assert_eq!(refused, "interface net3 of pod shop/web is in use; unplug it, or delete the pod\n");
        for (pod, interface) in [("web", "net9"), ("other", "net1")] {
            let refused = dropper.forget("shop", pod, interface).await.unwrap_err();
            let expected = format!("no record of interface {interface} of pod shop/{pod} is on this node\n");
            assert_eq!(refused, expected);
        }
        assert!(dropper.dropped.notified().now_or_never().is_none(), "nothing was dropped");
        // Otherwise the search for attachments of ended sandboxes would record it again.
        let results =
            ["old-net1", "new-net1"].map(|name| state.0.join("results").join(format!("blue-{name}")));
        fs::create_dir(state.0.join("results")).unwrap();
        for result in &results {
            fs::write(result, "{}").unwrap();
        }
        let dropped = dropper.forget("shop", "web", "net1").await.unwrap();
        assert_eq!(results.map(|result| result.exists()), [false, true]);
        assert!(
            dropped.starts_with("dropped interface net1 of pod shop/web on network shop/blue, sandbox old: ")
        );
        assert_eq!(dropped.lines().count(), 1, "{dropped}");
        assert!(dropper.dropped.notified().now_or_never().is_some(), "the workers are woken");
        // Its DEL was started.
        dropper.forget("shop", "web", "net2").await.unwrap();
        let left = journal.keys().into_iter().map(|key| (key.container, key.interface));
        let expected = ["net1", "net3"].map(|interface| ("new".to_owned(), interface.to_owned()));
        assert_eq!(left.collect::<Vec<_>>(), expected);
    }

    #[tokio::test]
    async fn nothing_is_dropped_while_the_runtime_does_not_answer() {
        let state = HostRoot::new("forget-silent");
        let journal = AttachmentJournal::open(&state.0).unwrap();
        journal.update(record("old", "net1", false)).await.unwrap();
        let mut fake = FakeRuntime::new("forget-no-answer");
        fake.stop().await;
        let dropper = dropper(&journal, &fake, &state.0);
        let refused = dropper.forget("shop", "web", "net1").await.unwrap_err();
        assert!(
            refused.starts_with("it is not known which sandboxes run, so nothing is dropped: "),
            "{refused}"
        );
        assert_eq!(journal.keys().len(), 1);
    }
}
