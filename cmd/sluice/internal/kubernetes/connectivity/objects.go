// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package connectivity

import (
	"strconv"

	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/kubectl"
)

// The label of all objects of the test.
const (
	labelKey   = "app.kubernetes.io/name"
	labelValue = "sluice-connectivity-test"
)

// The pods of the test, named by their location relative to the client. Each serves at its port.
const (
	client   = "client"
	friend   = "friend" // on the client's node, with the label that policies allow
	near     = "near"   // on the client's node
	far      = "far"    // on the other node
	hostPort = "hostport"
	service  = "web"

	port = 8080
)

type object = map[string]any

// podPlan is a pod to create.
type podPlan struct {
	name, node string
	labels     map[string]string
	hostPort   int
}

// podPlans returns the pods for one or two nodes. The backend of the Service is on the other node if there is one.
func podPlans(nodes []kubectl.Node, port int) []podPlan {
	first, last := nodes[0].Name, nodes[len(nodes)-1].Name
	plans := []podPlan{
		{name: client, node: first},
		{name: friend, node: first, labels: map[string]string{"access": "granted"}},
		{name: near, node: first, labels: map[string]string{"role": "server", "access": "granted"}},
	}
	if len(nodes) > 1 {
		plans = append(plans, podPlan{name: far, node: last, labels: map[string]string{"role": "server"}})
	}
	plans[len(plans)-1].labels[service] = "yes"
	if port != 0 {
		plans = append(plans, podPlan{name: hostPort, node: last, hostPort: port})
	}
	return plans
}

func namespaceOf(name string) object {
	return object{"apiVersion": "v1", "kind": "Namespace", "metadata": object{"name": name, "labels": object{
		labelKey: labelValue,
		// Only the pod with a hostPort needs this level; all others would be allowed at the level restricted.
		"pod-security.kubernetes.io/enforce": "privileged",
	}}}
}

// podOf returns a pod with Sluice's image, whose server needs no privileges.
func podOf(namespace string, p podPlan, set kubectl.DaemonSet) object {
	labels := object{labelKey: labelValue, "app": p.name}
	for key, value := range p.labels {
		labels[key] = value
	}
	exposed := object{"containerPort": port}
	if p.hostPort != 0 {
		exposed["hostPort"] = p.hostPort
	}
	container := object{
		"name": "probe", "image": set.Image,
		"command": []string{"sluice", "probe", "serve", "--address=:" + strconv.Itoa(port)},
		"ports":   []object{exposed},
		"securityContext": object{
			"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
			"capabilities": object{"drop": []string{"ALL"}},
		},
		"resources": object{"requests": object{"cpu": "5m", "memory": "20Mi"}},
	}
	if set.PullPolicy != "" {
		container["imagePullPolicy"] = set.PullPolicy
	}
	spec := object{
		"nodeName":                      p.node,
		"automountServiceAccountToken":  false,
		"enableServiceLinks":            false,
		"terminationGracePeriodSeconds": 1,
		"tolerations":                   []object{{"operator": "Exists"}},
		"securityContext": object{
			"runAsNonRoot": true, "runAsUser": 65532, "runAsGroup": 65532,
			"seccompProfile": object{"type": "RuntimeDefault"},
		},
		"containers": []object{container},
	}
	return object{
		"apiVersion": "v1", "kind": "Pod", "spec": spec,
		"metadata": object{"name": p.name, "namespace": namespace, "labels": labels},
	}
}

func serviceOf(namespace string) object {
	return object{
		"apiVersion": "v1", "kind": "Service",
		"metadata": object{"name": service, "namespace": namespace, "labels": object{labelKey: labelValue}},
		"spec": object{
			"type": "NodePort", "ipFamilyPolicy": "PreferDualStack", "selector": object{service: "yes"},
			"ports": []object{{"port": 80, "targetPort": port}},
		},
	}
}

// policyOf returns a NetworkPolicy for the selected pods that allows one direction only for peers with the labels.
func policyOf(namespace, name string, selected object, direction, peers string, allowed object) object {
	spec := object{
		"podSelector": object{"matchLabels": selected}, "policyTypes": []string{map[string]string{
			"ingress": "Ingress", "egress": "Egress",
		}[direction]},
		direction: []object{{peers: []object{{"podSelector": object{"matchLabels": allowed}}}}},
	}
	return object{
		"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "spec": spec,
		"metadata": object{"name": name, "namespace": namespace, "labels": object{labelKey: labelValue}},
	}
}
