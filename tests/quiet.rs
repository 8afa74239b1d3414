//! Waits until a program writes nothing more: the writes that a test caused may follow it by seconds.

use std::time::{Duration, Instant};

use anyhow::Result;
use lab::{
    Lab,
    audit::{AuditOffset, AuditedRequest},
    wait,
};

const TIMEOUT: Duration = Duration::from_secs(60);

/// Waits for a period in which the API server logged none of these requests. Returns the offset of its end.
pub async fn wait_until_quiet(
    lab: &Lab,
    period: Duration,
    counts: impl Fn(&AuditedRequest) -> bool,
) -> Result<AuditOffset> {
    let mut since = (lab.audit_offset()?, Instant::now());
    wait::until(TIMEOUT, &format!("{period:?} without a write"), || {
        let observed = lab.audit_offset().and_then(|now| Ok((now, lab.requests_since(since.0)?)));
        let outcome = observed.map(|(now, requests)| {
            if requests.iter().any(&counts) {
                since = (now, Instant::now());
            }
            (since.1.elapsed() > period).then_some(now)
        });
        async move { outcome }
    })
    .await
}

/// Whether a request is a write of a controller other than the renewal of its Lease.
pub fn is_controller_write(request: &AuditedRequest) -> bool {
    request.is_write() && request.user.ends_with("patchbay-controller") && request.resource != "leases"
}
