//! Patchbay on two nodes, installed from its image and its manifests as a user would do it.
#![allow(clippy::print_stdout, reason = "a test without the standard harness prints what it measured")]

#[path = "nodes/addresses.rs"]
mod addresses;
#[path = "nodes/cni_directory.rs"]
mod cni_directory;
#[path = "nodes/deletion.rs"]
mod deletion;
#[path = "nodes/drift.rs"]
mod drift;
#[path = "nodes/histories.rs"]
mod histories;
#[path = "nodes/nics.rs"]
mod nics;
#[path = "nodes/outages.rs"]
mod outages;
#[path = "nodes/rest.rs"]
mod rest;
#[path = "nodes/rights.rs"]
mod rights;
#[path = "nodes/traffic.rs"]
mod traffic;

use std::process::ExitCode;

use addresses::{
    a_journal_that_was_damaged_gives_no_address_twice_and_it_is_said,
    a_network_whose_blocks_are_refused_stands_in_no_others_way,
    a_small_subnet_is_filled_to_its_last_address_from_both_nodes, address_blocks_are_their_holders,
    other_plugins_and_requested_addresses_are_served,
    pods_have_distinct_addresses_and_reach_each_other_though_a_daemon_dies,
};
use cni_directory::the_plugin_is_installed_into_a_directory_of_another_user;
use deletion::{
    a_network_in_use_is_not_deleted_and_goes_within_3_s_of_its_last_user,
    a_node_that_is_gone_holds_up_nothing, a_pod_on_a_node_without_the_network_waits_and_starts_when_it_comes,
};
use drift::{
    a_vxlan_port_that_another_program_holds_is_a_reason_on_that_node_alone,
    an_uplink_that_a_node_needs_is_refused_there_and_not_elsewhere,
    links_and_attachments_of_others_are_left_alone, what_people_do_to_links_is_repaired_within_1_s,
};
use e2e::{Suite, patchbay, tests};
use histories::{
    a_pod_and_a_deletion_at_the_same_time_strand_nothing, random_histories_end_as_the_model_says,
};
use lab::Topology;
use nics::{
    a_flapping_nic_costs_at_most_one_write_a_second, a_new_nic_shows_within_1_s_and_goes_as_fast,
    every_node_publishes_its_nics_and_its_vtep_address, twenty_pods_starting_cause_no_write,
    what_people_do_to_a_nodenetwork_is_repaired,
};
use outages::{
    a_leader_pod_that_is_deleted_is_followed_within_15_s, a_node_that_joins_or_leaves_is_followed,
    a_silent_api_server_is_survived, after_a_reboot_pods_come_back_and_nics_that_went_are_not_published,
    kubernetes_can_be_left_without_patchbay_and_get_it_back, pods_come_and_go_while_the_daemon_is_away,
    what_a_node_misses_during_a_partition_is_made_up_for_after_it,
};
use rest::{
    nothing_is_written_while_nothing_changes,
    nothing_is_written_while_nothing_changes_and_little_when_something_does,
};
use rights::{
    a_node_daemon_can_write_only_its_own_nodes_objects,
    both_programs_run_under_the_installed_roles_without_one_refusal, each_capability_of_the_daemon_is_needed,
    no_container_is_privileged_and_the_image_tells_its_commit, the_webhook_is_reached_through_its_service,
};
use traffic::{
    a_network_is_ready_on_both_nodes_within_2_s_and_pods_of_a_node_reach_each_other,
    a_network_of_small_packets_has_pods_too,
    an_uplink_connects_pods_with_what_is_behind_it_and_comes_back_as_it_was,
    edits_converge_in_place_and_lose_no_packet,
    pods_of_different_nodes_reach_each_other_over_the_overlay_up_to_its_mtu,
};

const NODES: [&str; 2] = ["node-1", "node-2"];

fn main() -> ExitCode {
    Suite {
        name: "t-nodes",
        topology: Topology::Nodes(2),
        set_up: |lab| Box::pin(async move { patchbay::install(&lab).await }),
        tests: tests![
            every_node_publishes_its_nics_and_its_vtep_address,
            nothing_is_written_while_nothing_changes,
            twenty_pods_starting_cause_no_write,
            a_new_nic_shows_within_1_s_and_goes_as_fast,
            a_flapping_nic_costs_at_most_one_write_a_second,
            what_people_do_to_a_nodenetwork_is_repaired,
            the_webhook_is_reached_through_its_service,
            a_node_daemon_can_write_only_its_own_nodes_objects,
            no_container_is_privileged_and_the_image_tells_its_commit,
            a_network_is_ready_on_both_nodes_within_2_s_and_pods_of_a_node_reach_each_other,
            an_uplink_connects_pods_with_what_is_behind_it_and_comes_back_as_it_was,
            what_people_do_to_links_is_repaired_within_1_s,
            a_network_in_use_is_not_deleted_and_goes_within_3_s_of_its_last_user,
            an_uplink_that_a_node_needs_is_refused_there_and_not_elsewhere,
            links_and_attachments_of_others_are_left_alone,
            pods_of_different_nodes_reach_each_other_over_the_overlay_up_to_its_mtu
                + a_pod_on_a_node_without_the_network_waits_and_starts_when_it_comes
                + a_vxlan_port_that_another_program_holds_is_a_reason_on_that_node_alone
                + a_network_of_small_packets_has_pods_too
                + a_pod_and_a_deletion_at_the_same_time_strand_nothing
                + a_small_subnet_is_filled_to_its_last_address_from_both_nodes
                + other_plugins_and_requested_addresses_are_served
                + address_blocks_are_their_holders
                + a_network_whose_blocks_are_refused_stands_in_no_others_way,
            edits_converge_in_place_and_lose_no_packet,
            pods_have_distinct_addresses_and_reach_each_other_though_a_daemon_dies,
            a_journal_that_was_damaged_gives_no_address_twice_and_it_is_said,
            nothing_is_written_while_nothing_changes_and_little_when_something_does,
            pods_come_and_go_while_the_daemon_is_away,
            after_a_reboot_pods_come_back_and_nics_that_went_are_not_published,
            what_a_node_misses_during_a_partition_is_made_up_for_after_it,
            a_node_that_is_gone_holds_up_nothing,
            the_plugin_is_installed_into_a_directory_of_another_user,
            each_capability_of_the_daemon_is_needed,
            // Of everything until here. A program whose pod was deleted under it, or its role, is refused rightly.
            both_programs_run_under_the_installed_roles_without_one_refusal,
            a_leader_pod_that_is_deleted_is_followed_within_15_s,
            a_silent_api_server_is_survived,
            a_node_that_joins_or_leaves_is_followed,
            random_histories_end_as_the_model_says,
            kubernetes_can_be_left_without_patchbay_and_get_it_back,
        ],
    }
    .run()
}
