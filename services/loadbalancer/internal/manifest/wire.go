// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package manifest

import (
	"fmt"
	"strings"
)

// The objects as Kubernetes writes them, with every field that their kinds have: a
// test compares them with the types of k8s.io/api. A part that has no effect here
// is opaque: it may be anything.
type (
	opaque struct{}

	metadata struct {
		Name              string            `json:"name"`
		Namespace         string            `json:"namespace"`
		CreationTimestamp *string           `json:"creationTimestamp"`
		Labels            map[string]string `json:"labels"`
		Annotations       map[string]string `json:"annotations"`

		GenerateName               opaque `json:"generateName"`
		SelfLink                   opaque `json:"selfLink"`
		UID                        opaque `json:"uid"`
		ResourceVersion            opaque `json:"resourceVersion"`
		Generation                 opaque `json:"generation"`
		DeletionTimestamp          opaque `json:"deletionTimestamp"`
		DeletionGracePeriodSeconds opaque `json:"deletionGracePeriodSeconds"`
		OwnerReferences            opaque `json:"ownerReferences"`
		Finalizers                 opaque `json:"finalizers"`
		ManagedFields              opaque `json:"managedFields"`
	}

	serviceObject struct {
		head
		Metadata metadata      `json:"metadata"`
		Spec     serviceSpec   `json:"spec"`
		Status   serviceStatus `json:"status"`
	}
	serviceSpec struct {
		Ports                         []servicePort   `json:"ports"`
		Selector                      opaque          `json:"selector"`
		ClusterIP                     string          `json:"clusterIP"`
		ClusterIPs                    []string        `json:"clusterIPs"`
		Type                          string          `json:"type"`
		ExternalIPs                   []string        `json:"externalIPs"`
		SessionAffinity               string          `json:"sessionAffinity"`
		LoadBalancerIP                opaque          `json:"loadBalancerIP"`
		LoadBalancerSourceRanges      []string        `json:"loadBalancerSourceRanges"`
		ExternalName                  opaque          `json:"externalName"`
		ExternalTrafficPolicy         string          `json:"externalTrafficPolicy"`
		HealthCheckNodePort           int32           `json:"healthCheckNodePort"`
		PublishNotReadyAddresses      opaque          `json:"publishNotReadyAddresses"`
		SessionAffinityConfig         *affinityConfig `json:"sessionAffinityConfig"`
		IPFamilies                    []string        `json:"ipFamilies"`
		IPFamilyPolicy                *string         `json:"ipFamilyPolicy"`
		AllocateLoadBalancerNodePorts *bool           `json:"allocateLoadBalancerNodePorts"`
		LoadBalancerClass             opaque          `json:"loadBalancerClass"`
		InternalTrafficPolicy         *string         `json:"internalTrafficPolicy"`
		TrafficDistribution           opaque          `json:"trafficDistribution"` // it is in the hints of the slices
	}
	servicePort struct {
		Name        string `json:"name"`
		Protocol    string `json:"protocol"`
		AppProtocol opaque `json:"appProtocol"`
		Port        int32  `json:"port"`
		TargetPort  opaque `json:"targetPort"` // it is in the ports of the slices
		NodePort    int32  `json:"nodePort"`
	}
	affinityConfig struct {
		ClientIP *clientIPConfig `json:"clientIP"`
	}
	clientIPConfig struct {
		TimeoutSeconds *int32 `json:"timeoutSeconds"`
	}
	serviceStatus struct {
		LoadBalancer loadBalancerStatus `json:"loadBalancer"`
		Conditions   opaque             `json:"conditions"`
	}
	loadBalancerStatus struct {
		Ingress []ingress `json:"ingress"`
	}
	ingress struct {
		IP       string  `json:"ip"`
		Hostname opaque  `json:"hostname"`
		IPMode   *string `json:"ipMode"`
		Ports    opaque  `json:"ports"`
	}

	sliceObject struct {
		head
		Metadata    metadata       `json:"metadata"`
		AddressType string         `json:"addressType"`
		Endpoints   []endpoint     `json:"endpoints"`
		Ports       []endpointPort `json:"ports"`
	}
	endpoint struct {
		Addresses          []string           `json:"addresses"`
		Conditions         endpointConditions `json:"conditions"`
		Hostname           opaque             `json:"hostname"`
		TargetRef          opaque             `json:"targetRef"`
		DeprecatedTopology opaque             `json:"deprecatedTopology"`
		NodeName           *string            `json:"nodeName"`
		Zone               *string            `json:"zone"`
		Hints              *endpointHints     `json:"hints"`
	}
	endpointConditions struct {
		Ready       *bool `json:"ready"`
		Serving     *bool `json:"serving"`
		Terminating *bool `json:"terminating"`
	}
	endpointHints struct {
		ForZones []hint `json:"forZones"`
		ForNodes []hint `json:"forNodes"`
	}
	hint struct {
		Name string `json:"name"`
	}
	endpointPort struct {
		Name        *string `json:"name"`
		Protocol    *string `json:"protocol"`
		Port        *int32  `json:"port"`
		AppProtocol opaque  `json:"appProtocol"`
	}
)

// UnmarshalJSON takes anything.
func (*opaque) UnmarshalJSON([]byte) error { return nil }

// The labels and values that have a meaning here.
const (
	labelServiceName = "kubernetes.io/service-name"
	labelOtherProxy  = "service.kubernetes.io/service-proxy-name"
	annotationRanges = "service.beta.kubernetes.io/load-balancer-source-ranges"
	none             = "None" // spec.clusterIP of a headless service

	// annotationAlgorithm says how one of the service's backends is chosen: "table". Without
	// it, as the datapath chooses by default.
	annotationAlgorithm = "sluice.io/load-balancing-algorithm"
	algorithmTable      = "table"
)

// checkLabel says why a text is no label of DNS, as names of services are.
func checkLabel(s string) error {
	if len(s) > 63 {
		return fmt.Errorf("has %d characters, more than 63", len(s))
	}
	for i := range len(s) {
		if c := s[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && (c != '-' || i == 0 || i == len(s)-1) {
			return fmt.Errorf("must be lowercase letters, digits and '-' between them")
		}
	}
	if s == "" {
		return fmt.Errorf("is empty")
	}
	return nil
}

// checkSubdomain says why a text is no name of DNS, as names of slices are.
func checkSubdomain(s string) error {
	if len(s) > 253 {
		return fmt.Errorf("has %d characters, more than 253", len(s))
	}
	for label := range strings.SplitSeq(s, ".") {
		if checkLabel(label) != nil {
			return fmt.Errorf("must be lowercase letters, digits, '-' and '.' between them")
		}
	}
	return nil
}
