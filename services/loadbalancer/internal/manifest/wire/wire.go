// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package wire defines types for the Kubernetes objects that are read. They have the same fields as the types in
// k8s.io/api, which a test checks. k8s.io/api documents the meaning and the valid values of each field.
package wire

// Head contains the version and the kind of an object.
type Head struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
}

type (
	// Opaque is the type of a field that has no effect in Sluice. It accepts any value.
	Opaque struct{}

	// Metadata is the metadata of any object.
	Metadata struct {
		Name              string            `json:"name"`
		Namespace         string            `json:"namespace"`
		CreationTimestamp *string           `json:"creationTimestamp"`
		Labels            map[string]string `json:"labels"`
		Annotations       map[string]string `json:"annotations"`

		GenerateName               Opaque `json:"generateName"`
		SelfLink                   Opaque `json:"selfLink"`
		UID                        Opaque `json:"uid"`
		ResourceVersion            Opaque `json:"resourceVersion"`
		Generation                 Opaque `json:"generation"`
		DeletionTimestamp          Opaque `json:"deletionTimestamp"`
		DeletionGracePeriodSeconds Opaque `json:"deletionGracePeriodSeconds"`
		OwnerReferences            Opaque `json:"ownerReferences"`
		Finalizers                 Opaque `json:"finalizers"`
		ManagedFields              Opaque `json:"managedFields"`
	}

	// Service is a v1 Service.
	Service struct {
		Head
		Metadata Metadata      `json:"metadata"`
		Spec     ServiceSpec   `json:"spec"`
		Status   ServiceStatus `json:"status"`
	}
	// ServiceSpec is the spec of a Service.
	ServiceSpec struct {
		Ports                         []ServicePort   `json:"ports"`
		Selector                      Opaque          `json:"selector"`
		ClusterIP                     string          `json:"clusterIP"`
		ClusterIPs                    []string        `json:"clusterIPs"`
		Type                          string          `json:"type"`
		ExternalIPs                   []string        `json:"externalIPs"`
		SessionAffinity               string          `json:"sessionAffinity"`
		LoadBalancerIP                Opaque          `json:"loadBalancerIP"`
		LoadBalancerSourceRanges      []string        `json:"loadBalancerSourceRanges"`
		ExternalName                  Opaque          `json:"externalName"`
		ExternalTrafficPolicy         string          `json:"externalTrafficPolicy"`
		HealthCheckNodePort           int32           `json:"healthCheckNodePort"`
		PublishNotReadyAddresses      Opaque          `json:"publishNotReadyAddresses"`
		SessionAffinityConfig         *AffinityConfig `json:"sessionAffinityConfig"`
		IPFamilies                    []string        `json:"ipFamilies"`
		IPFamilyPolicy                *string         `json:"ipFamilyPolicy"`
		AllocateLoadBalancerNodePorts *bool           `json:"allocateLoadBalancerNodePorts"`
		LoadBalancerClass             Opaque          `json:"loadBalancerClass"`
		InternalTrafficPolicy         *string         `json:"internalTrafficPolicy"`
		// The field has no effect here, because the API server applies it to the hints of the slices.
		TrafficDistribution Opaque `json:"trafficDistribution"`
	}
	// ServicePort is a port of a Service.
	ServicePort struct {
		Name        string `json:"name"`
		Protocol    string `json:"protocol"`
		AppProtocol Opaque `json:"appProtocol"`
		Port        int32  `json:"port"`
		TargetPort  Opaque `json:"targetPort"` // the slices contain the resulting port
		NodePort    int32  `json:"nodePort"`
	}
	// AffinityConfig is the configuration of session affinity.
	AffinityConfig struct {
		ClientIP *ClientIPConfig `json:"clientIP"`
	}
	// ClientIPConfig is the configuration of affinity ClientIP.
	ClientIPConfig struct {
		TimeoutSeconds *int32 `json:"timeoutSeconds"`
	}
	// ServiceStatus is the status of a Service.
	ServiceStatus struct {
		LoadBalancer LoadBalancerStatus `json:"loadBalancer"`
		Conditions   Opaque             `json:"conditions"`
	}
	// LoadBalancerStatus is the status of a load balancer in front of the cluster.
	LoadBalancerStatus struct {
		Ingress []Ingress `json:"ingress"`
	}
	// Ingress is an address of a load balancer.
	Ingress struct {
		IP       string  `json:"ip"`
		Hostname Opaque  `json:"hostname"`
		IPMode   *string `json:"ipMode"`
		Ports    Opaque  `json:"ports"`
	}

	// Slice is an EndpointSlice of discovery.k8s.io/v1.
	Slice struct {
		Head
		Metadata    Metadata       `json:"metadata"`
		AddressType string         `json:"addressType"`
		Endpoints   []Endpoint     `json:"endpoints"`
		Ports       []EndpointPort `json:"ports"`
	}
	// Endpoint is an endpoint of a Slice.
	Endpoint struct {
		Addresses          []string           `json:"addresses"`
		Conditions         EndpointConditions `json:"conditions"`
		Hostname           Opaque             `json:"hostname"`
		TargetRef          Opaque             `json:"targetRef"`
		DeprecatedTopology Opaque             `json:"deprecatedTopology"`
		NodeName           *string            `json:"nodeName"`
		Zone               *string            `json:"zone"`
		Hints              *EndpointHints     `json:"hints"`
	}
	// EndpointConditions are the conditions of an Endpoint; nil: unset.
	EndpointConditions struct {
		Ready       *bool `json:"ready"`
		Serving     *bool `json:"serving"`
		Terminating *bool `json:"terminating"`
	}
	// EndpointHints restrict the clients of an Endpoint.
	EndpointHints struct {
		ForZones []Hint `json:"forZones"`
		ForNodes []Hint `json:"forNodes"`
	}
	// Hint names a zone or a node.
	Hint struct {
		Name string `json:"name"`
	}
	// EndpointPort is a port of all endpoints of a Slice.
	EndpointPort struct {
		Name        *string `json:"name"`
		Protocol    *string `json:"protocol"`
		Port        *int32  `json:"port"`
		AppProtocol Opaque  `json:"appProtocol"`
	}
)

// UnmarshalJSON accepts any value.
func (*Opaque) UnmarshalJSON([]byte) error { return nil }
