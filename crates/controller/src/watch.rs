//! Watches whose failures are counted and logged, and watches of single objects.

use std::{fmt::Debug, sync::Arc};

use api::ErrorChain;
use client::watch::{self, ObjectEvent, ObjectWatch, StreamEvent, WatchConfig};
use futures::{Stream, StreamExt, stream, stream::BoxStream};
use kube::{Api, Resource};
use serde::de::DeserializeOwned;
use tracing::warn;

use crate::metrics::{ApiCallKind, Metrics};

/// Lists and watches objects. Failures are counted and logged; the watch goes on after its backoff.
pub fn events<K>(
    api: Api<K>,
    config: WatchConfig,
    metrics: Arc<Metrics>,
    call: ApiCallKind,
) -> impl Stream<Item = StreamEvent<K>> + Send
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    positioned_events(api, config, metrics, call).map(|(event, _)| event)
}

/// Like [`events`], with the resourceVersion that the watch has reached: see [`watch::positioned`].
pub fn positioned_events<K>(
    api: Api<K>,
    config: WatchConfig,
    metrics: Arc<Metrics>,
    call: ApiCallKind,
) -> impl Stream<Item = (StreamEvent<K>, Option<u64>)> + Send
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    watch::positioned(api, config).inspect(move |(event, _)| {
        if let StreamEvent::Failed(error) | StreamEvent::NotServed(error) = event {
            failed(&metrics, call, error);
        }
    })
}

fn failed(metrics: &Metrics, call: ApiCallKind, error: &watch::Error) {
    metrics.api_error(call);
    warn!(?call, error = %ErrorChain(error), "watch failed, retrying");
}

/// Yields whenever the object of this name may have changed.
pub fn object_changes<K>(
    api: Api<K>,
    name: &str,
    metrics: Arc<Metrics>,
    call: ApiCallKind,
) -> BoxStream<'static, ()>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let watch = ObjectWatch::new(api, WatchConfig::one(name));
    stream::unfold((watch, metrics), move |(mut watch, metrics)| async move {
        loop {
            match watch.next().await {
                ObjectEvent::Synced(_) | ObjectEvent::Changed(_) | ObjectEvent::Deleted(_) => {
                    return Some(((), (watch, metrics)));
                }
                ObjectEvent::Failed(error) => failed(&metrics, call, &error),
                // No change was missed.
                ObjectEvent::Resumed => {}
            }
        }
    })
    .boxed()
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
        let api: Api<Secret> = Api::namespaced(Client::new(service, "ns"), "ns");
        let mut changes = object_changes(api, "name", metrics.clone(), ApiCallKind::WatchSecret);
        assert!(tokio::time::timeout(Duration::from_mins(5), changes.next()).await.is_err());
        assert!(metrics.text().unwrap().contains("patchbay_api_errors_total{call=\"WatchSecret\"}"));
    }
}
