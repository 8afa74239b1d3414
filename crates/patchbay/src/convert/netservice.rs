//! NetServices of the NetService controller (`svcctl.metaswitch.com`).

use super::{draft::Draft, input::InputObject};

const GROUP: &str = "svcctl.metaswitch.com/";

/// What is different for every NetService.
const GENERAL: [&str; 3] = [
    "NetServices: Patchbay creates no Service NAME-template; change clients that use that name",
    "NetServices: every IPv4 and IPv6 address of a pod on the network is published, not one IPv4 address",
    "NetServices: addresses are published in EndpointSlices; Patchbay creates no Endpoints objects",
];

pub fn is_netservice(object: &InputObject) -> bool {
    object.kind == "NetService" && object.api_version.starts_with(GROUP)
}

pub fn convert(object: &InputObject) -> Result<Draft, String> {
    if object.api_version != "svcctl.metaswitch.com/v1alpha1" {
        return Err("only version v1alpha1 of svcctl.metaswitch.com is known".to_owned());
    }
    let mut draft = Draft::new(object, &[])?;
    draft.set_network("spec.netAttachDef", object.get(&["spec", "netAttachDef"]))?;
    draft.set_selector(object)?;
    draft.note_unknown(object, &["spec"], &["netAttachDef", "selector"]);
    if draft.has_labels() {
        draft.note("its labels are copied to the Service and its EndpointSlices");
    }
    draft.general.extend(GENERAL);
    Ok(draft)
}
