//! Watches that outlive the API server.

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

use crate::metrics::{Call, Metrics};

/// The API server ends a watch after so many seconds, and one that is silent for five more is given up: that is how soon a
/// partition that swallows everything is noticed.
const LONGEST_WATCH: u32 = 60;

/// A watch of everything.
pub fn all() -> watcher::Config {
    watcher::Config::default().timeout(LONGEST_WATCH)
}

/// A watch of the one object of this name, which need not exist.
pub fn only(name: &str) -> watcher::Config {
    all().fields(&format!("metadata.name={name}"))
}

/// Counts and reports a failure; the watch itself goes on after its backoff.
pub fn failed(metrics: &Metrics, call: Call, error: &watcher::Error) {
    metrics.api_error(call);
    warn!(?call, error = %ErrorChain(error), "watch failed and is tried again");
}

/// Says "look" whenever the one object of this name may have changed.
pub fn touches<K>(
    api: Api<PartialObjectMeta<K>>,
    name: &str,
    metrics: Arc<Metrics>,
    call: Call,
) -> BoxStream<'static, ()>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
    PartialObjectMeta<K>: Resource<DynamicType = ()>,
{
    watcher(api, only(name))
        .default_backoff()
        .inspect_err(move |error| failed(&metrics, call, error))
        .filter_map(async |event| event.is_ok_and(|event| tells(&event)).then_some(()))
        .boxed()
}

/// Whether there is something new to look at. The beginning of a list is none: a list that fails begins again and again.
fn tells<K>(event: &Event<K>) -> bool {
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
    async fn a_list_that_fails_wakes_nobody() {
        let service = tower::service_fn(async |_: http::Request<kube::client::Body>| {
            let response = http::Response::builder().status(500).body(Body::from("{}"));
            Ok::<_, Infallible>(response.unwrap())
        });
        let metrics = Arc::new(Metrics::default());
        let api = Api::namespaced(Client::new(service, "ns"), "ns");
        let mut touches = touches::<Secret>(api, "name", metrics.clone(), Call::WatchSecret);
        assert!(tokio::time::timeout(Duration::from_mins(5), touches.next()).await.is_err());
        assert!(metrics.text().unwrap().contains("patchbay_api_errors_total{call=\"WatchSecret\"}"));
    }

    #[test]
    fn every_watch_ends_within_a_minute() {
        assert_eq!([all().timeout, only("name").timeout], [Some(60); 2]);
    }
}
