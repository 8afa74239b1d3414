//! Patchbay on two nodes, installed from its image and its manifests: one lab for its functions, one for outages.
#![allow(clippy::print_stdout, reason = "a test without the standard harness prints its measurements")]

#[path = "nodes/addresses.rs"]
mod addresses;
#[path = "nodes/cni_directory.rs"]
mod cni_directory;
#[path = "nodes/deletion.rs"]
mod deletion;
#[path = "nodes/drift.rs"]
mod drift;
#[path = "nodes/idle.rs"]
mod idle;
#[path = "nodes/ipam_faults.rs"]
mod ipam_faults;
#[path = "nodes/lost_blocks.rs"]
mod lost_blocks;
#[path = "nodes/nics.rs"]
mod nics;
#[path = "nodes/outages.rs"]
mod outages;
#[path = "nodes/random_operations.rs"]
mod random_operations;
#[path = "nodes/rbac.rs"]
mod rbac;
#[path = "nodes/services.rs"]
mod services;
#[path = "nodes/traffic.rs"]
mod traffic;

use std::process::ExitCode;

use addresses::{
    a_damaged_journal_assigns_no_address_twice_and_is_reported,
    a_network_with_rejected_blocks_does_not_delay_other_networks, only_the_holder_can_write_an_address_block,
    other_cni_plugins_and_requested_addresses_are_served,
    pods_get_unique_reachable_addresses_even_if_a_daemon_is_killed,
    two_nodes_use_a_small_subnet_to_its_last_address,
};
use cni_directory::the_plugin_is_installed_into_a_directory_of_another_user;
use deletion::{
    a_deleted_node_does_not_block_deletion, a_network_in_use_is_deleted_within_3_s_of_its_last_user,
    a_pod_waits_until_its_node_has_the_network, an_address_holds_its_network_although_no_annotation_names_it,
};
use drift::{
    a_vxlan_port_in_use_fails_only_on_that_node, an_uplink_that_a_node_needs_is_rejected_only_on_that_node,
    foreign_links_and_nads_are_not_touched, link_drift_is_repaired_within_1_s,
};
use e2e::{Suite, patchbay, run_suites, tests};
use idle::{a_new_network_causes_few_writes_and_then_none, an_idle_cluster_causes_no_writes};
use ipam_faults::{
    a_reimaged_node_reuses_its_blocks, pods_terminate_while_the_daemon_cannot_write_its_state,
};
use lab::Topology;
use lost_blocks::a_deleted_ipblock_is_created_again_or_its_loss_is_reported;
use nics::{
    a_flapping_nic_causes_at_most_one_write_per_second, every_node_publishes_its_nics_and_its_vtep_address,
    nic_changes_are_published_within_1_s, nodenetwork_drift_is_repaired, twenty_starting_pods_cause_no_write,
};
use outages::{
    a_deleted_leader_is_replaced_within_15_s, a_node_catches_up_after_a_partition,
    after_a_reboot_pods_recover_and_lost_nics_are_not_published, an_api_server_outage_restarts_no_daemon,
    nodenetworks_follow_joining_and_leaving_nodes, patchbay_can_be_uninstalled_and_reinstalled,
    while_the_daemon_is_down_pods_are_deleted_and_new_ones_wait,
};
use random_operations::{
    a_pod_created_during_deletion_is_rejected_or_keeps_its_network, random_operations_converge_to_the_model,
};
use rbac::{
    a_node_daemon_can_write_only_the_objects_of_its_own_node,
    a_node_daemon_can_write_only_two_annotations_of_the_pods_of_its_node,
    a_node_daemon_records_events_only_in_the_name_of_its_node,
    no_container_is_privileged_and_the_image_carries_its_commit, no_request_of_patchbay_is_unauthorized,
    the_daemon_needs_each_of_its_capabilities, the_webhook_is_reachable_through_its_service,
};
use services::{
    a_client_resolves_a_service_and_connects_over_the_secondary_network,
    a_service_of_the_netservice_controller_is_handed_over_without_a_dns_gap,
    an_adopted_service_is_cleaned_of_endpoints_that_its_selector_left,
    an_annotated_service_of_the_user_answers_with_names_by_the_subdomain_rule,
    converted_samples_of_the_netservice_controller_work, endpoints_follow_hot_plug_and_readiness,
};
use traffic::{
    a_network_is_ready_within_2_s_and_connects_pods_of_one_node, a_network_with_a_small_mtu_connects_pods,
    an_overlay_connects_pods_across_nodes_up_to_its_mtu,
    an_uplink_connects_pods_and_is_restored_after_deletion, edits_converge_in_place_and_lose_no_packet,
};

const NODES: [&str; 2] = ["node-1", "node-2"];

fn main() -> ExitCode {
    run_suites(&[
        Suite {
            name: "t-nodes",
            topology: Topology::Nodes(2),
            set_up: |lab| Box::pin(async move { patchbay::install(&lab).await }),
            tests: tests![
                // None of these makes Patchbay write, and the second checks that for all of them.
                every_node_publishes_its_nics_and_its_vtep_address
                    + an_idle_cluster_causes_no_writes
                    + twenty_starting_pods_cause_no_write
                    + the_webhook_is_reachable_through_its_service
                    + no_container_is_privileged_and_the_image_carries_its_commit,
                nic_changes_are_published_within_1_s,
                a_flapping_nic_causes_at_most_one_write_per_second,
                nodenetwork_drift_is_repaired,
                a_node_daemon_can_write_only_the_objects_of_its_own_node
                    + a_node_daemon_can_write_only_two_annotations_of_the_pods_of_its_node
                    + a_node_daemon_records_events_only_in_the_name_of_its_node,
                a_network_is_ready_within_2_s_and_connects_pods_of_one_node,
                an_uplink_connects_pods_and_is_restored_after_deletion,
                link_drift_is_repaired_within_1_s,
                a_network_in_use_is_deleted_within_3_s_of_its_last_user,
                an_uplink_that_a_node_needs_is_rejected_only_on_that_node,
                foreign_links_and_nads_are_not_touched,
                an_overlay_connects_pods_across_nodes_up_to_its_mtu
                    + a_pod_waits_until_its_node_has_the_network
                    + an_address_holds_its_network_although_no_annotation_names_it
                    + a_vxlan_port_in_use_fails_only_on_that_node
                    + a_network_with_a_small_mtu_connects_pods
                    + a_pod_created_during_deletion_is_rejected_or_keeps_its_network
                    + two_nodes_use_a_small_subnet_to_its_last_address
                    + other_cni_plugins_and_requested_addresses_are_served
                    + only_the_holder_can_write_an_address_block
                    + a_network_with_rejected_blocks_does_not_delay_other_networks
                    + edits_converge_in_place_and_lose_no_packet,
                a_client_resolves_a_service_and_connects_over_the_secondary_network
                    + endpoints_follow_hot_plug_and_readiness
                    + an_annotated_service_of_the_user_answers_with_names_by_the_subdomain_rule
                    + converted_samples_of_the_netservice_controller_work
                    + a_service_of_the_netservice_controller_is_handed_over_without_a_dns_gap
                    + an_adopted_service_is_cleaned_of_endpoints_that_its_selector_left,
                a_new_network_causes_few_writes_and_then_none,
                no_request_of_patchbay_is_unauthorized,
                random_operations_converge_to_the_model,
            ],
        },
        Suite {
            name: "t-outages",
            topology: Topology::Nodes(2),
            set_up: |lab| Box::pin(async move { patchbay::install(&lab).await }),
            tests: tests![
                pods_get_unique_reachable_addresses_even_if_a_daemon_is_killed,
                a_damaged_journal_assigns_no_address_twice_and_is_reported,
                while_the_daemon_is_down_pods_are_deleted_and_new_ones_wait,
                a_deleted_ipblock_is_created_again_or_its_loss_is_reported,
                after_a_reboot_pods_recover_and_lost_nics_are_not_published,
                a_node_catches_up_after_a_partition,
                a_deleted_node_does_not_block_deletion,
                // The first one restarts the daemon of node-1, the second one reboots node-2.
                pods_terminate_while_the_daemon_cannot_write_its_state + a_reimaged_node_reuses_its_blocks,
                the_plugin_is_installed_into_a_directory_of_another_user,
                the_daemon_needs_each_of_its_capabilities,
                // Checks all requests until here. Later tests delete pods and roles, so 401 and 403 are expected then.
                no_request_of_patchbay_is_unauthorized,
                a_deleted_leader_is_replaced_within_15_s,
                an_api_server_outage_restarts_no_daemon,
                nodenetworks_follow_joining_and_leaving_nodes,
                patchbay_can_be_uninstalled_and_reinstalled,
            ],
        },
    ])
}
