//! Looks for changes of the configuration of multus, and reports a node on which it is not known.

use std::{sync::Arc, time::Duration};

use client::events::{self, EventDraft};
use k8s_openapi::api::core::v1::Node;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use super::{Deps, Problem};
use crate::Error;

/// How often the configuration is checked. A problem that is seen twice in a row is reported: multus may just be writing its
/// file, or starting.
const POLL: Duration = Duration::from_secs(10);

/// Runs until `stop`.
pub async fn run(deps: Arc<Deps>, node: String, stop: CancellationToken) -> Result<(), Error> {
    let mut before: Option<String> = None;
    let mut reported = false;
    loop {
        let problem = deps.settings.isolation.problem(&*deps.multus.read().await);
        let lasting = problem.clone().filter(|problem| before.as_ref() == Some(problem));
        if let Some(note) = lasting.clone().filter(|_| !reported) {
            // Like the kubelet, which uses the name as the UID: `kubectl describe node` shows both.
            let regarding = events::reference::<Node>(None, &node, &node);
            let (reason, action) = ("MultusConfigUnknown", "ReadMultusConfig");
            deps.events.recorder().record(regarding, EventDraft { warning: true, reason, action, note });
        }
        reported = lasting.is_some();
        deps.report(Problem::Multus, lasting);
        before = problem;
        if stop.run_until_cancelled(sleep(POLL)).await.is_none() {
            return Ok(());
        }
    }
}
