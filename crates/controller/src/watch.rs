//! Watch settings, and watches of single objects that survive failures of the API server.

use std::{fmt::Debug, sync::Arc};

use api::ErrorChain;
use futures::{StreamExt, TryStreamExt, stream::BoxStream};
use k8s_openapi::serde::de::DeserializeOwned;
use kube::{
    Api, Resource,
    core::PartialObjectMeta,
    runtime::{
        WatchStreamExt,
        watcher::{self, Event, watcher},
    },
};
use tracing::warn;

use crate::metrics::{ApiCallKind, Metrics};

/// The API server ends a watch after this many seconds, and kube gives up a silent one five seconds later. This bounds how
/// long a partition that drops all packets goes unnoticed.
const WATCH_TIMEOUT_SECONDS: u32 = 60;

/// Watches all objects.
pub fn all() -> watcher::Config {
    watcher::Config::default().timeout(WATCH_TIMEOUT_SECONDS)
}

/// Watches the object of this name, which need not exist.
pub fn by_name(name: &str) -> watcher::Config {
    all().fields(&format!("metadata.name={name}"))
}

/// Counts and logs a failure. The watch goes on after its backoff.
pub fn failed(metrics: &Metrics, call: ApiCallKind, error: &watcher::Error) {
    metrics.api_error(call);
    warn!(?call, error = %ErrorChain(error), "watch failed, retrying");
}

/// Yields whenever the object of this name may have changed.
pub fn object_changes<K>(
    api: Api<PartialObjectMeta<K>>,
    name: &str,
    metrics: Arc<Metrics>,
    call: ApiCallKind,
) -> BoxStream<'static, ()>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
    PartialObjectMeta<K>: Resource<DynamicType = ()>,
{
    watcher(api, by_name(name))
        .default_backoff()
        .inspect_err(move |error| failed(&metrics, call, error))
        .filter_map(async |event| event.is_ok_and(|event| is_change(&event)).then_some(()))
        .boxed()
}

/// The start of a list is not a change: a failing list starts again and again.
fn is_change<K>(event: &Event<K>) -> bool {
    match event {
        Event::Apply(_) | Event::Delete(_) | Event::InitDone => true,
        Event::Init | Event::InitApply(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use std::{convert::Infallible, time::Duration};

    use axum::{body::Body, http};
    use k8s_openapi::api::core::v1::Secret;
    use kube::Client;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_failing_list_yields_no_change() {
        let service = tower::service_fn(async |_: http::Request<kube::client::Body>| {
            let response = http::Response::builder().status(500).body(Body::from("{}"));
            Ok::<_, Infallible>(response.unwrap())
        });
        let metrics = Arc::new(Metrics::default());
        let api = Api::namespaced(Client::new(service, "ns"), "ns");
        let mut changes = object_changes::<Secret>(api, "name", metrics.clone(), ApiCallKind::WatchSecret);
        assert!(tokio::time::timeout(Duration::from_mins(5), changes.next()).await.is_err());
        assert!(metrics.text().unwrap().contains("patchbay_api_errors_total{call=\"WatchSecret\"}"));
    }

    #[test]
    fn every_watch_ends_within_a_minute() {
        assert_eq!([all().timeout, by_name("name").timeout], [Some(60); 2]);
    }
}
