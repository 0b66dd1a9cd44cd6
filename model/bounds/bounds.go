// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package bounds lists the limits that tenants share, and the effect on a tenant that reaches one.
// docs/reference/bounds.md is generated from the list. scripts/check verifies that the list contains every limit of
// the settings, and that the page is up to date.
package bounds

// Divided is the kind of party that a limit is divided among.
type Divided string

// The ways to divide a limit.
const (
	// ByTenant divides a limit among tenants, as package shares does.
	ByTenant Divided = "tenant"
	// ByNamespace reserves a part of the limit for namespaces that use little of it.
	ByNamespace Divided = "namespace"
	// BySender divides by the address of senders outside the cluster; an IPv6 sender is its /64.
	BySender Divided = "sender outside"
	// ByEndpoint divides one half of the limit equally among the endpoints of a node that use it,
	// and lets all of them use the other half.
	ByEndpoint Divided = "endpoint"
	// ByUse removes the oldest item of the endpoint that uses the most of the limit, once the limit is reached.
	ByUse Divided = "endpoint that uses most"
	// PerObject is a limit of a single object: no tenant can use up the capacity of another.
	PerObject Divided = "object"
	// ByRoot is a limit that only calls and files of root use: tenants cannot use it up.
	ByRoot Divided = "root alone"
	// Undivided is a limit of the node or the cluster that is not divided yet.
	Undivided Divided = "not divided"
)

// Bound is one limit.
type Bound struct {
	Name    string
	Process string
	// Setting is the key that changes the limit; empty: it is fixed.
	Setting string
	// Default is the limit without a setting, with its unit.
	Default string
	Divided Divided
	// Beyond describes the effect on demand above the limit or the share.
	Beyond string
	// Shown lists where an operator sees it.
	Shown string
	// In lists the eBPF maps that have this limit, and its numbers in sl_bound and sl_rate (SL_BOUND_...,
	// SL_RATE_...); empty: it is no limit of the programs. scripts/check verifies that each map that programs fill,
	// and each number, has a limit. A test of the kernel uses up all of them.
	In []string
	// Tests lists tests that exhaust the limit with one tenant while another is unaffected, or that show the effect
	// of a limit of one object. An undivided limit may have none.
	Tests []string
}

// All lists the limits by process.
var All = []Bound{
	{
		Name: "policies", Process: "sluice-policy", Setting: "limits.policies", Default: "40,000", Divided: ByTenant,
		Beyond: "if a tenant exceeds its share, the pods that its newest policies select are isolated",
		Shown:  "`sluice shares`, `policy list`, condition and Event (`ExceedsShare`), `sluice_policy_exceeds_share`",
		Tests: []string{
			"TestOneNamespaceCannotKeepThePoliciesOfOthersOut", "TestOldestObjectsOfATenantAreEnforcedInEveryOrder",
		},
	},
	{
		Name: "bytes of policies", Process: "sluice-policy", Setting: "limits.manifests", Default: "256 MiB",
		Divided: ByTenant,
		Beyond:  "if a tenant exceeds its share, the pods that its newest policies select are isolated",
		Shown:   "as for policies", Tests: []string{"TestOneNamespaceCannotKeepThePoliciesOfOthersOut"},
	},
	{
		Name: "policies beyond a share, which isolate pods", Process: "sluice-policy", Setting: "limits.policies",
		Default: "40,000, and an eighth of `limits.manifests` in bytes", Divided: ByTenant,
		Beyond: "one isolation of the whole namespace replaces the newest of them; such a policy takes about 900 bytes",
		Shown:  "as for policies",
		Tests: []string{
			"TestPoliciesBeyondTheShareTakeBoundedMemory", "TestNamespaceIsIsolatedForPoliciesThatAreNotKept",
		},
	},
	{
		Name: "CIDRGroups", Process: "sluice-policy", Setting: "limits.policies",
		Default: "they count as policies of *system*, and their bytes, too", Divided: ByTenant,
		Beyond: "the newest groups are closed: deny rules that name one apply to every address, allow rules to none",
		Shown:  "as for policies", Tests: []string{"TestGroupBeyondTheShareIsClosed"},
	},
	{
		Name: "rules, classes and prefixes of one table", Process: "sluice-policy",
		Default: "65,534 rules, 4,096 identity classes, 16,384 prefixes a family", Divided: PerObject,
		Beyond: "deny and pass rules are enforced, allow rules as far as they fit; " +
			"an identity without a class is unknown there",
		Shown: "`policy list`, `sluice_policy_reduced_tables`",
		Tests: []string{
			"TestTablesOfOneTenantKeepOutNoPolicyOfTheCluster", "TestATableTreatsAnIdentityThatDoesNotFitAsUnknownUntilItDoes",
		},
	},
	{
		Name: "policies in the report of a node", Process: "sluice-policy", Default: "1,024, and 48 KiB", Divided: ByTenant,
		Beyond: "the status of the other policies gives their number by reason; each tenant has some in the report",
		Shown:  "`policy list` of the node", Tests: []string{"TestObjectsOfOneTenantLeaveRoomInAReportForOthers"},
	},
	{
		Name: "DNS names", Process: "sluice-policy", Setting: "names.max", Default: "16,384", Divided: ByEndpoint,
		Beyond: "a pod above its guarantee only replaces its own expired names, or LearnNames is refused; " +
			"a pod below it replaces the names of such pods that expire first",
		Shown: "error of the call",
		Tests: []string{"TestNamesWhoseTimeIsOverMakeRoom", "TestNamesOfOneTenantKeepOutNoneOfAnother"},
	},
	{
		Name: "addresses of DNS names", Process: "sluice-policy", Setting: "names.addresses", Default: "262,144",
		Divided: ByEndpoint, Beyond: "as for DNS names", Shown: "error of the call",
		Tests: []string{"TestNamesWhoseTimeIsOverMakeRoom", "TestNamesOfOneTenantKeepOutNoneOfAnother"},
	},
	{
		Name: "addresses of one DNS name", Process: "sluice-policy", Default: "1,024", Divided: ByEndpoint,
		Beyond: "expired addresses are removed; then a pod below its part of the name replaces what expires first " +
			"of pods above their part; LearnNames of other pods is refused",
		Shown: "error of the call", Tests: []string{"TestOnePodFillsNoName"},
	},
	{
		Name: "split-rows", Process: "sluice-policy", Default: "26,214", Divided: ByTenant,
		Beyond: "selectors of a tenant above its share do not split classes that have rows in tables of other tenants",
		Shown:  "`sluice shares`, `sluice status`",
		Tests: []string{
			"TestSplitClassesFillNoTablesOfAnotherTenant", "TestClassesCountForTheTenantThatSplitsThem",
		},
	},
	{
		Name: "rule-sets", Process: "sluice-policy", Default: "65,534", Divided: ByTenant,
		Beyond: "sets of layer 7 rules of a tenant above its share have no number, and a proxy refuses their connections",
		Shown:  "`sluice shares`, `sluice status`, `sluice_policy_exceeds_share`",
		Tests:  []string{"TestOneTenantDoesNotTakeTheNumbersOfAnother", "TestOneTenantDoesNotUseUpTheRuleSets"},
	},
	{
		Name: "rule-set-bytes", Process: "sluice-policy", Default: "64 MiB", Divided: ByTenant,
		Beyond: "the union of several policies of a tenant above its share is not built: one of them applies alone; " +
			"other sets have no number, as for rule-sets",
		Shown: "`sluice shares`, `sluice_policy_exceeds_share`", Tests: []string{"TestUnionsTakeBoundedMemory"},
	},
	{
		Name: "identity-classes", Process: "sluice-policy", Default: "26,213 of 32,767", Divided: ByTenant,
		Beyond: "selectors of a tenant above its share do not split classes: their allow rules match no peer " +
			"of such a class, their deny rules match all",
		Shown: "`sluice shares`, `sluice status`, `sluice_policy_exceeds_share`",
		Tests: []string{
			"TestSelectorsOfOneTenantSplitClassesWithinItsShare",
			"TestTenantSplitsItsClassesBesideTenantsThatSplitAll",
			"TestTablesAllowNoMoreWhileTenantsHaveNoRoomForClasses",
			"TestIdentityOfAnIdentityClassWithoutANumberIsKnownWhenThereIsRoom",
		},
	},
	{
		Name: "requests for the status of policies", Process: "sluice-controller", Default: "20 a second", Divided: ByTenant,
		Beyond: "the policies of a tenant wait; tenants take turns, and namespaces without the label are one group of two",
		Shown:  "`controller status`", Tests: []string{"TestPoliciesOfOneTenantDelayNoStatusOfAnother"},
	},
	{
		Name: "Events about Services beyond a share", Process: "sluice-controller", Default: "100, then 100 an hour",
		Divided: ByTenant, Beyond: "the Events of the other Services of the tenant come later, or not at all",
		Shown: "`controller status`",
		Tests: []string{"TestServicesOfOneTenantNeitherDelayOthersNorFillTheStore"},
	},
	{
		Name: "frontends", Process: "sluice-loadbalancer", Setting: "limits.frontends",
		Default: "65,536, less if the datapath has less", Divided: ByTenant,
		Beyond: "the newest frontends of a tenant above its share refuse connections",
		Shown:  "`sluice shares`, `service get`, `sluice_loadbalancer_exceeds_share`",
		Tests:  []string{"TestFloodOfFrontendsKeepsNoServiceOfOthersOut", "TestFrontendsBeyondTheShareRefuseConnections"},
	},
	{
		Name: "backends", Process: "sluice-loadbalancer", Setting: "limits.backends",
		Default: "280,000, less if the datapath has less", Divided: ByTenant,
		Beyond: "the backends of the newest slices of a tenant above its share are not used",
		Shown:  "as for frontends", Tests: []string{
			"TestRemovedBackendsLeaveThoughNewOnesExceedTheShare", "TestTenantHas250000BackendsBesideTheReserve",
			"TestKernelMapsHoldTheirLimitOfBackends",
		},
	},
	{
		Name: "Services", Process: "sluice-loadbalancer", Setting: "limits.services", Default: "65,536", Divided: ByTenant,
		Beyond: "the newest Services of a tenant above its share refuse connections until there is capacity",
		Shown:  "`sluice shares`, `service list`, `sluice_loadbalancer_exceeds_share`",
		Tests:  []string{"TestFloodOfObjectsKeepsNoServiceOfOthersOut", "TestServicesBeyondTheShareRefuseConnections"},
	},
	{
		Name: "EndpointSlices", Process: "sluice-loadbalancer", Setting: "limits.endpointSlices", Default: "131,072",
		Divided: ByTenant,
		Beyond:  "the newest slices of a tenant above its share are not kept, and are added once there is capacity",
		Shown:   "as for Services", Tests: []string{"TestFloodOfObjectsKeepsNoServiceOfOthersOut"},
	},
	{
		Name: "Services in the report of a node", Process: "sluice-loadbalancer", Default: "128, and 16 KiB",
		Divided: ByTenant, Beyond: "the other Services beyond a share get no Event; each tenant has some in the report",
		Shown: "`service list` of the node",
		Tests: []string{"TestObjectsOfOneTenantLeaveRoomInAReportForOthers", "TestServicesBeyondTheShareAreReported"},
	},
	{
		Name: "backends of one Service", Process: "sluice-loadbalancer", Setting: "limits.backendsPerService",
		Default: "65,536, less if the datapath has less", Divided: PerObject,
		Beyond: "the backends of its newest slices are not used", Shown: "`service get`",
		Tests: []string{"TestLimitsAreThoseOfTheDatapath"},
	},
	{
		Name: "bytes of files", Process: "sluice-loadbalancer", Setting: "limits.manifests", Default: "256 MiB",
		Divided: ByRoot, Beyond: "a file is refused", Shown: "`sluice status`",
		Tests: []string{"TestFilesTogetherAreBounded"},
	},
	{
		Name: "addresses of a node in quarantine", Process: "sluice-ipam", Default: "the addresses that no pod holds",
		Divided: ByNamespace,
		Beyond: "an eighth is reserved: a namespace with as many addresses in quarantine as are free gets none of it; " +
			"its new pods wait",
		Shown: "error of ADD",
		Tests: []string{
			"TestShortLivedPodsOfOneNamespaceLeaveAddressesToOthers", "TestNamespaceOfACallCounts",
			"TestUserWithManyNamespacesTakesTheReservedAddresses", "TestAPITenantKeepsItsPodsBesideANoisyOne",
		},
	},
	{
		Name: "blocks of one node", Process: "sluice-ipam", Setting: "maxBlocksPerNode", Default: "16 of each family",
		Divided: PerObject, Beyond: "the blocks that the node claims in addition are ignored and reported",
		Shown: "`sluice status`",
		Tests: []string{"TestOnlyBlocksOfThePoolCount", "TestNodeThatClaimsEveryBlockKeepsNoOtherFromJoining"},
	},
	{
		Name: "numbers of removed frontends and backends", Process: "sluice-loadbalancer",
		Default: "the free capacity of the datapath's maps", Divided: ByTenant,
		Beyond: "a tenant with removed numbers in quarantine must leave an eighth of the maps to others: its new " +
			"frontends and backends are refused until these numbers are free",
		Shown: "`service get`, `sluice status`",
		Tests: []string{
			"TestKernelNumbersThatRestCountForTheTenantThatUsedThem", "TestFrontendsWithoutRoomAreTriedWhenNumbersAreFree",
			"TestKernelNewFrontendsWithoutRoomRefuseConnections",
		},
	},
	{
		Name: "connections to the health check port of a Service", Process: "sluice-loadbalancer", Default: "64",
		Divided: BySender,
		Beyond:  "a further connection replaces the oldest one of the sender with the most connections",
		Shown:   "answers of the port", Tests: []string{"TestSilentConnectionsKeepNoLoadBalancerOut"},
	},
	{
		Name: "listening sockets that the datapath keeps over a restart of sluice-loadbalancer", Process: datapath,
		Default: "1,024", Divided: Undivided,
		Beyond: "connections to further health check ports are refused during the restart",
		Shown:  "log of sluice-loadbalancer",
	},
	{
		Name: "source ranges of load balancers", Process: datapath, Default: "16,384 of each family", Divided: ByTenant,
		Beyond: "load balancer addresses of the newest Services refuse connections",
		Shown:  "`service get`, `sluice status`",
		Tests:  []string{"TestKernelSourceRangesOfOneTenantLeaveRoomForOthers"},
	},
	{
		Name: "tables of the annotation for consistent hashing", Process: "sluice-loadbalancer",
		Default: "622,592 places of lists and tables, as units of the limit of backends", Divided: ByTenant,
		Beyond: "the backends of the newest slices of a tenant above its share are not used",
		Shown:  "`service get`, `sluice status`",
		Tests: []string{
			"TestTablesCountForTheirTenant", "TestKernelTablesWithinTheLimitLeaveRoomForLists",
			"TestKernelListsOfOneTenantLeavePiecesForOthers", "TestKernelTableWithoutRoomIsRefusedAndTheRestIsApplied",
		},
	},
	{
		Name: "identity numbers", Process: "sluice-identity", Default: "65,280 in the cluster", Divided: ByTenant,
		Beyond: "a new pod waits in ADD, a pod whose labels change is isolated",
		Shown:  "`sluice shares`, `sluice status`, error of ADD",
		Tests: []string{
			"TestATenantHasAQuarterOfTheFreeNumbersAtMost", "TestNamespacesWithoutTheLabelHaveHalfOfTheNumbersTogether",
			"TestWhatIsPublishedBoundsATenantOnAllNodes",
		},
	},
	{
		Name: "identity numbers of one node", Process: "sluice-identity", Setting: "quota", Default: "4,096",
		Divided: ByTenant, Beyond: "ADD fails, a pod whose labels change is isolated",
		Shown: "`sluice status`, error of ADD",
		Tests: []string{"TestATenantLeavesPartOfTheQuotaOfANodeToOthers", "TestChangeWithoutNumberIsolatesAtOnce"},
	},
	{
		Name: "new label sets by changes of labels", Process: "sluice-identity",
		Default: "256, then 1 a second, on a node", Divided: ByTenant,
		Beyond: "a change waits for its turn; after 15 s the pod is isolated", Shown: "`sluice status`",
		Tests: []string{"TestPodsThatFlipTheirLabelsDelayNoOtherTenant", "TestTenantsTakeTurns"},
	},
	{
		Name: "changes of the labels of one pod", Process: "sluice-identity", Default: "5, then 1 in 10 s",
		Divided: PerObject,
		Beyond: "a change waits; after 15 s the pod is isolated; the newest labels count; a change that only removes " +
			"permissions does not wait",
		Shown: "`sluice status`",
		Tests: []string{
			"TestRatesOfAPod", "TestLabelsThatNeverRestTakeFewNumbers", "TestChangeThatNarrowsWaitsForNoRate",
			"TestQuarantineNarrows",
		},
	},
	{
		Name: "changes of the labels of the pods of one controller", Process: "sluice-identity",
		Default: "256, then 1 a second", Divided: PerObject,
		Beyond: "a change waits; after 15 s the pod is isolated", Shown: "`sluice status`",
		Tests: []string{"TestRatesOfAControllerCountWithinItsNamespace"},
	},
	{
		Name: "labels of one pod and its namespace", Process: "sluice-identity", Default: "256", Divided: PerObject,
		Beyond: "the pod is isolated", Shown: "`sluice status`",
		Tests: []string{"TestPodWhoseLabelsAreTooManyIsIsolated", "TestPodThatGetsTooManyLabelsIsIsolated"},
	},
	{
		Name: "named ports of one pod", Process: "sluice-identity", Default: "256, and 4,096 bytes", Divided: PerObject,
		Beyond: "the other names match no rule", Shown: "`sluice status`",
		Tests: []string{"TestPodWithManyNamedPortsHasAnIdentity"},
	},
	{
		Name: "tables", Process: datapath, Default: "3,264 of 4,080", Divided: ByTenant, Beyond: closed, Shown: ofMaps,
		Tests: []string{
			"TestFullMapsOfOneTenantChangeNothingForAnother", "TestNewTableOfATenantWithinItsShareHasRoomAtOnce",
			"TestKernelTenantThatFillsTheMapsLeavesRoomForAnother",
		},
	},
	{
		Name: "table-rules", Process: datapath, Default: "209,716 of 262,144", Divided: ByTenant, Beyond: closed,
		Shown: ofMaps, Tests: everyMap,
	},
	{
		Name: "port-nodes", Process: datapath, Default: "13,108 of 16,384", Divided: ByTenant, Beyond: closed,
		Shown: ofMaps, Tests: everyMap,
	},
	{
		Name: "peer-classes", Process: datapath, Default: "52,429 of 65,536", Divided: ByTenant, Beyond: closed,
		Shown: ofMaps, Tests: everyMap,
	},
	{
		Name: "peer-rows", Process: datapath, Default: "209,716 of 262,144", Divided: ByTenant,
		Beyond: "in tables of a tenant that exceeds its share, peers whose rows do not fit are treated as unknown",
		Shown:  ofMaps,
		Tests: append([]string{
			"TestRowWithoutRoomConcernsTheTableThatLacksIt", "TestTablesWithoutRoomForRowsAllowNoMore",
		}, everyMap...),
	},
	{
		Name: "prefixes-ipv4", Process: datapath, Default: "52,429 of 65,536", Divided: ByTenant, Beyond: prefixes,
		Shown: ofMaps,
		Tests: []string{"TestPrefixWithoutRoomClosesWhatItWouldDeny", "TestKernelTenantThatFillsTheMapsLeavesRoomForAnother"},
	},
	{
		Name: "prefixes-ipv6", Process: datapath, Default: "52,429 of 65,536", Divided: ByTenant, Beyond: prefixes,
		Shown: ofMaps,
		Tests: []string{"TestPrefixWithoutRoomClosesWhatItWouldDeny", "TestKernelTenantThatFillsTheMapsLeavesRoomForAnother"},
	},
	{
		Name: "host ports of containers", Process: datapath,
		Default: "a sixteenth of the datapath's frontends, which services do not get", Divided: ByTenant,
		Beyond: "ADD of a pod of a tenant above its share fails", Shown: "error of ADD",
		Tests: []string{
			"TestHostPortsOfOneNamespaceLeaveRoomForOthers", "TestHostPortsOfNamespacesLeaveALabelledTenantItsPart",
		},
	},
	{
		Name: "NAT ports of the node to one backend on another node", Process: "sluice-datapath",
		Default: "10,000 of TCP, 10,000 of UDP", Divided: BySender,
		Beyond: "half-open TCP and UDP replace each other, the oldest first; " +
			"a sender above its share is refused (`nat-share`)",
		Shown: "`observe`, `sluice_datapath_packets_total` (`nat-share`, `nat-exhausted`)",
		In:    []string{"sl_xl4", "sl_xl6"},
		Tests: []string{
			"TestKernelOpenConnectionsOfOneSenderLeavePortsToOthers", "TestKernelHalfOpenConnectionsGiveWay",
			"TestKernelDatagramsOfOneSenderLeavePortsToOthers", "TestKernelEndedConnectionsFreeTheirPorts",
			"TestSurplusOfOpenConnections",
		},
	},
	{
		Name: "connections from outside", Process: "sluice-datapath",
		Default: "65,536 for IPv4, 32,768 for IPv6", Divided: BySender,
		Beyond: "connections that are not proven, and UDP with ICMP echo, replace each other, the oldest first; " +
			"the senders with most proven connections lose their longest idle",
		Shown: "`sluice conntrack list`",
		In:    []string{"sl_ct4", "sl_ct6", "sl_ring4", "sl_ring6"},
		Tests: []string{"TestKernelSilentSendersReplaceEachOther", "TestSurplusOfOpenConnections"},
	},
	{
		Name: "connections of pods", Process: datapath,
		Default: "131,072 for IPv4, 65,536 for IPv6; those from outside are part of them", Divided: ByEndpoint,
		Beyond: "new connections of an endpoint above its budget are dropped (`connection-budget`)",
		Shown:  "`observe`, `sluice_datapath_packets_total` (`connection-budget`), `sluice shares`",
		In:     []string{"sl_ct4", "sl_ct6", "sl_budget"},
		Tests:  []string{"TestKernelFloodOfOneEndpointPushesOutNobody"},
	},
	{
		Name: "translations of packets of pods to Services", Process: datapath,
		Default: "14,336 for IPv4, 7,168 for IPv6", Divided: ByEndpoint,
		Beyond: "first TCP packets of an endpoint above its guarantee are dropped (`translation-share`); UDP flows have " +
			"no translation",
		Shown: "`observe`, `sluice_datapath_packets_total` (`translation-share`), `sluice shares`",
		In:    []string{"sl_pod_xl4", "sl_pod_xl6", "sl_pod_answers4", "sl_pod_answers6", "SL_BOUND_XL4", "SL_BOUND_XL6"},
		Tests: []string{
			"TestKernelTranslationsOfOnePodLeaveThoseOfOthers", "TestKernelPodsThatComeLaterHaveTheirShareOfTranslations",
			"TestKernelSharesOutliveTheirCollector", "TestKernelUDPFlowsAreNotRefused",
		},
	},
	{
		Name: "connections that wait for sluice-http", Process: datapath, Default: "2,048 since its last heartbeat",
		Divided: ByEndpoint,
		Beyond:  "connections of an endpoint above its guarantee are dropped (`proxy-budget`)",
		Shown:   "`observe`, `sluice_datapath_packets_total` (`proxy-budget`)",
		In:      []string{"sl_http_taken"},
		Tests:   []string{"TestOnePodFillsNoQueueOfAnother"},
	},
	{
		Name: "queue of packets to the DNS proxy", Process: datapath, Default: "4,096 packets", Divided: ByEndpoint,
		Beyond: "packets of an endpoint above its guarantee are dropped (`proxy-budget`)",
		Shown:  "`observe`, `sluice_datapath_packets_total` (`proxy-budget`)",
		In:     []string{"sl_proxy", "sl_proxy_taken"},
		Tests:  []string{"TestOnePodFillsNoQueueOfAnother"},
	},
	{
		Name: "fragmented datagrams of pods", Process: datapath, Default: "3,584", Divided: ByEndpoint,
		Beyond: "first fragments of an endpoint above its guarantee are dropped (`fragment-share`)",
		Shown:  "`observe`, `sluice_datapath_packets_total` (`fragment-share`), `sluice shares`",
		In:     []string{"sl_pod_frag", "SL_BOUND_FRAGMENTS"},
		Tests:  []string{"TestKernelFragmentsOfOnePodLeaveThoseOfOthers"},
	},
	{
		Name: "backends that pods keep by session affinity", Process: datapath, Default: "3,584 of each family",
		Divided: ByEndpoint,
		Beyond:  "connections of an endpoint above its guarantee choose a backend again",
		Shown:   "`sluice shares`", In: []string{"sl_pod_aff4", "sl_pod_aff6", "SL_BOUND_AFFINITY4", "SL_BOUND_AFFINITY6"},
		Tests: []string{"TestKernelAffinityOfOnePodLeavesThatOfOthers"},
	},
	{
		Name: "translations of packets from outside, and ports of the node", Process: datapath,
		Default: "32,768 for IPv4, 16,384 for IPv6", Divided: Undivided,
		Beyond: "the least recently used entries are evicted; pods have maps of their own",
		Shown:  "`sluice shares`", In: []string{"sl_xl4", "sl_xl6"},
		Tests: []string{"TestKernelTranslationsFromOutsideLeaveThoseOfPods"},
	},
	{
		Name: "copies of translations of connections from outside and of the host", Process: datapath,
		Default: "16,384 for IPv4, 8,192 for IPv6", Divided: Undivided,
		Beyond: "the least recently used copies are evicted; pods have maps of their own",
		Shown:  "`sluice map dump sl_answers4`", In: []string{"sl_answers4", "sl_answers6"},
		Tests: []string{"TestKernelAnswersFromOutsideLeaveThoseOfPods"},
	},
	{
		Name: "fragmented datagrams from outside, from other nodes and from the host", Process: datapath,
		Default: "8,192", Divided: Undivided,
		Beyond: "the least recently used entries are evicted; later fragments of their datagrams are dropped",
		Shown:  "`sluice shares`", In: []string{"sl_frag"},
		Tests: []string{"TestKernelFragmentsFromOutsideLeaveThoseOfPods"},
	},
	{
		Name: "backends that clients outside keep by session affinity", Process: datapath,
		Default: "8,192 of each family", Divided: Undivided,
		Beyond: "the least recently used entries are evicted; these clients choose a backend again",
		Shown:  "`sluice shares`", In: []string{"sl_aff4", "sl_aff6"},
		Tests: []string{"TestKernelAffinityFromOutsideLeavesThatOfPods"},
	},
	{
		Name: "records of TCP connections that policies terminated", Process: datapath, Default: "10,752 of each family",
		Divided: ByEndpoint,
		Beyond: "TCP connections of an endpoint above its guarantee are not picked up without an entry for " +
			"`connections.tcpEstablished`",
		Shown: "`sluice shares`, `sluice_datapath_connections_unremembered_total`",
		In:    []string{"sl_revoked4", "sl_revoked6", "SL_BOUND_REVOKED4", "SL_BOUND_REVOKED6"},
		Tests: []string{"TestKernelTerminatedConnectionsOfOnePodLeaveThoseOfOthers"},
	},
	{
		Name: "events that wait for the datapath", Process: datapath, Default: "6,898", Divided: ByEndpoint,
		Beyond: "events of an endpoint above its guarantee are left out and counted",
		Shown:  "`observe` (lost events), `sluice_datapath_events_lost_total`, `sluice shares`",
		In:     []string{"sl_events", "SL_BOUND_EVENTS"},
		Tests:  []string{"TestKernelEventsOfOnePodLeaveRoomInTheRing", "TestKernelEventsOfOneEndpointLeaveRoomForOthers"},
	},
	{
		Name: "events in a second", Process: datapath, Setting: "events.perSecond",
		Default: "64 of one endpoint; of one CPU and reason 1,024 of endpoints, 512 of no endpoint", Divided: ByEndpoint,
		Beyond: "events are left out and counted; each endpoint of the node is guaranteed its part of 512",
		Shown:  "`observe` (lost events), `sluice_datapath_events_lost_total`",
		In:     []string{"sl_limits", "sl_ep_limits"},
		Tests: []string{
			"TestKernelEventsOfManyEndpointsLeaveRoomForOthers", "TestKernelEventsOfOneEndpointLeaveRoomForOthers",
		},
	},
	{
		Name: "resets and ICMP errors that the eBPF programs send to pods", Process: datapath,
		Default: "1,000 per second and CPU", Divided: ByEndpoint,
		Beyond: "packets of an endpoint above its guarantee are dropped without an answer",
		Shown:  "`sluice shares`, `sluice map dump sl_rate`",
		In:     []string{"sl_rate", "SL_BOUND_ANSWERS", "SL_RATE_ANSWERS_TO_PODS"},
		Tests:  []string{"TestKernelAnswersToOnePodLeaveThoseToOthers"},
	},
	{
		Name: "resets and ICMP errors that the eBPF programs send to senders outside", Process: datapath,
		Default: "1,000 of each per second and CPU", Divided: Undivided,
		Beyond: "packets are dropped without an answer",
		Shown:  "`sluice map dump sl_rate`",
		In:     []string{"sl_rate", "SL_RATE_ANSWERS_OUTSIDE", "SL_RATE_ERRORS_OUTSIDE"},
		Tests:  []string{"TestKernelOutsideRefusalsHaveABudget"},
	},
	{
		Name: "ICMPv6 packet-too-big errors about unknown connections", Process: datapath,
		Default: "100 per second and CPU", Divided: ByEndpoint,
		Beyond: "errors to an endpoint above its guarantee pass only as its policy says",
		Shown:  "`sluice shares`, `sluice map dump sl_rate`",
		In:     []string{"sl_rate", "SL_BOUND_TOO_BIG", "SL_RATE_TOO_BIG"},
		Tests:  []string{"TestKernelTooBigAboutNothingIsLimited"},
	},
	{
		Name: "counted senders to backends elsewhere", Process: "sluice-datapath", Default: "8,192", Divided: Undivided,
		Beyond: "a new sender gets at most 64 ports to a backend while half of the ports to it are in use",
		Shown:  "`sluice_datapath_packets_total` (`nat-share`)",
		In:     []string{"sl_share"},
	},
	{
		Name: "stored flows", Process: hubble, Setting: "history.maxSize", Default: "64 MiB", Divided: ByTenant,
		Beyond: "the tenant with most flows loses its oldest ones; from the 64th tenant on, the others share one part",
		Shown:  "`hubble observe` (events lost), `sluice_hubble_history_bytes`",
		Tests:  []string{"TestLargestTenantLosesItsOldestRecords", "TestTenantsBeyondTheMaximumShareAPart"},
	},
	{
		Name: "flows in memory for readers that follow", Process: hubble, Default: "4,096", Divided: Undivided,
		Beyond: "a slower reader loses flows and gets their number; no other reader and no event waits",
		Shown:  "`hubble observe` (events lost)",
		Tests:  []string{"TestSlowReaderKnowsHowManyRecordsItMissed", "TestSeenAndLostAreSent"},
	},
	{
		Name: "calls that read stored flows", Process: hubble, Default: "2 at a time, 100 ms each turn", Divided: PerObject,
		Beyond: "a call waits for its turn; a call that does not read has none",
		Shown:  "the answer takes longer",
		Tests:  []string{"TestClientThatDoesNotReadDelaysNoOther", "TestAnswersOfManyTurnsAreComplete"},
	},
	{
		Name: "clients over TCP", Process: hubble, Default: "64 connections, 32 calls", Divided: Undivided,
		Beyond: "connections are closed, and calls fail with RESOURCE_EXHAUSTED; clients of the unix socket have their own " +
			"limits",
		Shown: "error of the call, log", Tests: []string{"TestCallsOverTCPAreBounded", "TestTenantsLeaveConnectionsToOthers"},
	},
	{
		Name: "TLS handshakes of clients", Process: hubble, Default: "64, of 3 s each", Divided: BySender,
		Beyond: "the oldest connection of the address with the most handshakes is closed",
		Shown:  "error of the call",
		Tests:  []string{"TestSilentConnectionsDisplaceNoOther", "TestHandshakeEnds"},
	},
	{
		Name: "connections with certificates of tenants", Process: hubble, Default: "48, of one tenant 16", Divided: ByTenant,
		Beyond: "connections are closed; 16 of the 64 connections over TCP are left for other certificates",
		Shown:  "error of the call, log", Tests: []string{"TestTenantsLeaveConnectionsToOthers"},
	},
	{
		Name: "calls with certificates of tenants", Process: hubble, Default: "24, of one tenant 8", Divided: ByTenant,
		Beyond: "calls fail with RESOURCE_EXHAUSTED; 8 of the 32 calls over TCP are left for other certificates",
		Shown:  "error of the call", Tests: []string{"TestTenantsLeaveCallsToOthers"},
	},
	{
		Name: "exported flows", Process: hubble, Setting: "history.export.maxSize", Default: "10 MiB and 5 renamed files",
		Divided: Undivided, Beyond: "the oldest file is removed", Shown: "`sluice_hubble_export_lines_total`",
		Tests: []string{"TestExportRotatesItsFiles", "TestExportWaitsForAFileThatCanBeWritten"},
	},
	{
		Name: "connections to the web page", Process: hubble, Default: "64", Divided: Undivided,
		Beyond: "the oldest connection without a call that has the token is closed",
		Shown:  "the browser connects again", Tests: []string{"TestConnectionsWithoutTheTokenEndNoCall"},
	},
	{
		Name: "calls of the web page", Process: hubble, Divided: Undivided,
		Default: "8; requests of 64 KiB, policies of 1 MiB, 10,000 flows by number",
		Beyond:  "status 503, 413 or 400; a request without the token is no call",
		Shown:   "message of the page",
		Tests:   []string{"TestConnectionsWithoutTheTokenEndNoCall", "TestPageRefusesInvalidRequests"},
	},
	{
		Name: "series of flow metrics", Process: hubble, Setting: "flowMetrics.maxSeries", Default: "10,000",
		Divided: ByTenant,
		Beyond:  "flows of further series are only counted as left out; half is divided among 64 tenants",
		Shown:   "`sluice_hubble_metrics_left_out_total`",
		Tests:   []string{"TestTenantThatScansPortsLeavesSeriesToOthers"},
	},
	{
		Name: "database of sluice-store", Process: store, Setting: "quota", Default: "1 GiB", Divided: Undivided,
		Beyond: "writes are refused, also new label sets of all nodes; reads, deletions and renewals of leases go on",
		Shown:  "`sluice store status`", Tests: []string{"TestKernelFullStoreRecovers"},
	},
	{
		Name: "names of DNS answers", Process: dns, Setting: "names.max", Default: "16,384", Divided: ByEndpoint,
		Beyond: taught,
		Shown:  "`sluice fqdn explain`, `sluice_dns_names`", Tests: []string{"TestPodAboveItsGuaranteeIsRefusedFirst"},
	},
	{
		Name: "addresses of DNS answers", Process: dns, Setting: "names.addresses", Default: "262,144",
		Divided: ByEndpoint, Beyond: taught,
		Shown: "`sluice fqdn explain`, `sluice_dns_addresses`", Tests: []string{"TestPodAboveItsGuaranteeIsRefusedFirst"},
	},
	{
		Name: "addresses of a name in DNS answers", Process: dns, Default: "1,024", Divided: PerObject,
		Beyond: "further addresses of the name are not learned",
		Shown:  "`sluice fqdn explain`", Tests: []string{"TestAddressesOfOneNameAreBounded"},
	},
	{
		Name: "DNS queries of a pod that wait for their answer", Process: dns, Default: "512", Divided: PerObject,
		Beyond: "the answer to the oldest query of the pod is dropped",
		Shown:  "`sluice_dns_answers_total` (`unasked`)", Tests: []string{"TestQueriesOfOnePodAreBounded"},
	},
	{
		Name: "DNS answers to a pod that wait for sluice-policy", Process: dns, Default: "512", Divided: PerObject,
		Beyond: "further answers to the pod pass, and connections to their new addresses are denied",
		Shown:  "`sluice_dns_late_total` (`share`)", Tests: []string{"TestHeldAnswersOfOnePodAreBounded"},
	},
	{
		Name: "memory of held DNS answers", Process: dns, Default: "16 MiB, of one pod 2 MiB", Divided: ByUse,
		Beyond: "the oldest answer to the pod that uses most passes, and its addresses are not learned; if it is large or " +
			"fragmented, it is dropped",
		Shown: "`sluice_dns_late_total` (`share`)", Tests: []string{"TestOnePodDelaysNoOther"},
	},
	{
		Name: "DNS queries that wait for their rule set", Process: dns, Default: "1,024, of one pod 64", Divided: ByUse,
		Beyond: "the oldest query of the pod that has most is dropped",
		Shown:  "`sluice_dns_dropped_packets_total` (`share`)", Tests: []string{"TestOnePodDelaysNoOther"},
	},
	{
		Name: "memory of fragments of DNS answers", Process: dns, Default: "4 MiB, of one pod 512 KiB", Divided: ByUse,
		Beyond: "the oldest incomplete answer to the pod that uses most is dropped",
		Shown:  "`sluice_dns_dropped_packets_total` (`fragment-share`)", Tests: []string{"TestFragmentsOfOnePodAreBounded"},
	},
	{
		Name: "connections of sluice-http", Process: http, Default: "16,384, of one pod a quarter", Divided: ByUse,
		Beyond: "the oldest connection of the pod with the most is reset",
		Shown:  "`sluice_http_dropped_connections_total` (`share`)",
		Tests:  []string{"TestOnePodTakesNoConnectionOfAnother", "TestConnectionsFitIntoTheLimitOfDescriptors"},
	},
}

// Texts that the limits of the policy maps share. A fifth of each map is not divided.
const (
	datapath = "sluice-datapath"
	hubble   = "sluice-hubble"
	store    = "sluice-store"
	dns      = "sluice-dns"
	http     = "sluice-http"
	taught   = "answers to pods above their guarantee pass, but are not learned; " +
		"a pod below it replaces what expires first of such pods"
	closed   = "tables of a tenant above its share keep only their first rules; if none fits, their pods are isolated"
	prefixes = "as for tables; a learned address is left out"
	ofMaps   = "`sluice shares`, `sluice status` of the node, `sluice_datapath_exceeds_share`"
)

var everyMap = []string{
	"TestKernelTenantThatFillsTheMapsLeavesRoomForAnother", "TestRulesOfATableAreAdmittedOneByOne",
	"TestPartOfATableAllowsNoMoreAfterAnyWrite", "TestKernelTablesBeyondAShareHaveSomeOfTheirRules",
}
