//! What the manifests say about IPAMClaims.

use super::*;

#[test]
fn the_controller_accepts_every_flag_that_it_gets() {
    let options = options(&[
        "--keep-unplugged-claims",
        "--reference-foreign-nads",
        "--default-network-nad-namespace=ovn-kubernetes",
    ]);
    let deployment = deployment::deployment(&options);
    let args = list(&deployment["spec"]["template"]["spec"]["containers"][0]["args"]);
    let args = args.iter().map(|argument| argument.as_str().unwrap());
    let line = ["patchbay"].into_iter().chain(args).chain(["--namespace=ns", "--identity=a"]);
    if let Err(error) = crate::cli::Cli::try_parse_from(line) {
        panic!("{error}");
    }
}

/// Creating a kind or a webhook configuration and writing IPBlocks cannot be restricted by RBAC.
#[test]
fn policies_restrict_the_controllers_kinds_webhooks_and_blocks() {
    for (name, resources, rule) in [
        ("patchbay-controller-crds", json!(["customresourcedefinitions"]), "'ipamclaims.k8s.cni.cncf.io'"),
        ("patchbay-controller-webhooks", json!(["mutatingwebhookconfigurations"]), "== 'patchbay'"),
        ("patchbay-controller-ipblocks", json!(["ipblocks", "ipblocks/status"]), "'ipamclaims/patchbay'"),
    ] {
        let policy = object_named("ValidatingAdmissionPolicy", name);
        assert_eq!(policy["spec"]["failurePolicy"], "Fail");
        assert_eq!(policy["spec"]["matchConstraints"]["resourceRules"][0]["resources"], resources);
        assert!(policy["spec"]["validations"][0]["expression"].as_str().unwrap().contains(rule), "{policy}");
        let binding = object_named("ValidatingAdmissionPolicyBinding", name);
        assert_eq!(binding["spec"], json!({"policyName": name, "validationActions": ["Deny"]}));
    }
    for (role, rule) in rules() {
        let resources = list(&rule["resources"]);
        if role == "ClusterRole patchbay-controller"
            && ["customresourcedefinitions", "mutatingwebhookconfigurations"]
                .iter()
                .any(|it| resources.contains(&json!(it)))
        {
            let create_only = rule["verbs"] == json!(["create"]);
            assert!(create_only || !list(&rule["resourceNames"]).is_empty(), "{rule}");
        }
    }
}

/// A webhook that fails closed and that no controller serves would reject every launcher pod: during an upgrade, and for
/// ever if the new image cannot be pulled.
#[test]
fn the_webhook_of_launcher_pods_is_left_to_the_leader() {
    assert!(of_kind(&all_objects(), "MutatingWebhookConfiguration").is_empty());
    for webhook in webhooks() {
        assert_ne!(webhook["clientConfig"]["service"]["path"], "/mutate-v1-pod");
    }
}

/// Other pods start while no controller runs, and other updates of pods are not delayed.
#[test]
fn only_pods_that_refer_to_a_claim_call_the_webhook_of_references() {
    let reference =
        webhooks().into_iter().find(|webhook| webhook["name"] == "claims.pods.patchbay.dev").unwrap();
    let [_, condition] = list(&reference["matchConditions"]) else { panic!("{reference}") };
    assert_eq!(*condition, json!(controller::pod_configuration::networks_change()));
    assert_eq!(reference["rules"], json!([controller::pod_configuration::pod_rule()]));
    // The daemon reads a reference in any case and with escapes.
    let networks = "object.metadata.annotations['k8s.v1.cni.cncf.io/networks']";
    let refers =
        format!(r"({networks}.lowerAscii().contains('ipam-claim-reference') || {networks}.contains('\\u'))");
    let condition = reference["matchConditions"][0]["expression"].as_str().unwrap();
    assert!(condition.ends_with(&refers), "{condition}");
}
