// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package capture

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/kubectl"
	"github.com/sluice-net/sluice/kit/instance"
)

// Labels of the command's objects. They differ from the labels of the DaemonSet's pods.
const (
	labelKey      = "app.kubernetes.io/name"
	labelValue    = "sluice-capture"
	containerName = "capture"
)

type object = map[string]any

// jobOf returns the Job. Its pod has access to the datapath's socket, the network namespaces of the node's pods, and
// the capabilities to enter one (SYS_ADMIN) and to open a packet socket there (NET_RAW). It has no other privileges and
// no token. It uses the host network, because the pod network may be broken.
func jobOf(namespace, name, node string, set kubectl.DaemonSet) object {
	labels := object{labelKey: labelValue}
	mount := func(name, path string) object {
		return object{"name": name, "mountPath": path, "mountPropagation": "HostToContainer", "readOnly": true}
	}
	hostPath := func(name, path string) object {
		return object{"name": name, "hostPath": object{"path": path, "type": "Directory"}}
	}
	container := object{
		"name": containerName, "image": set.Image, "command": []string{"sluice", "probe", "hold"},
		"securityContext": object{
			"runAsUser": 0, "runAsGroup": instance.GroupID,
			"allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true,
			"capabilities": object{"drop": []string{"ALL"}, "add": []string{"NET_RAW", "SYS_ADMIN"}},
		},
		// The pod requests no resources, so that it also fits on a full node.
		"resources": object{
			"requests": object{"cpu": "0", "memory": "0"}, "limits": object{"memory": "128Mi"},
		},
		"volumeMounts": []object{mount("run", "/run/sluice"), mount("netns", "/run/netns")},
	}
	if set.PullPolicy != "" {
		container["imagePullPolicy"] = set.PullPolicy
	}
	var secrets []object
	for _, s := range set.PullSecrets {
		secrets = append(secrets, object{"name": s})
	}
	pod := object{
		"nodeName":                      node,
		"restartPolicy":                 "Never",
		"hostNetwork":                   true,
		"automountServiceAccountToken":  false,
		"enableServiceLinks":            false,
		"terminationGracePeriodSeconds": 1,
		"tolerations":                   []object{{"operator": "Exists"}},
		"securityContext":               object{"seccompProfile": object{"type": "RuntimeDefault"}},
		"imagePullSecrets":              secrets,
		"containers":                    []object{container},
		"volumes":                       []object{hostPath("run", "/run/sluice"), hostPath("netns", "/run/netns")},
	}
	return object{
		"apiVersion": "batch/v1", "kind": "Job",
		"metadata": object{"name": name, "namespace": namespace, "labels": labels},
		"spec": object{
			"backoffLimit": 0, "ttlSecondsAfterFinished": 30,
			"template": object{"metadata": object{"labels": labels}, "spec": pod},
		},
	}
}

// jobPod contains the fields of the Job's pod that the command needs.
type jobPod struct {
	Metadata struct{ Name string }
	Status   struct {
		Phase, Reason, Message string
		ContainerStatuses      []struct {
			State struct {
				Waiting    *struct{ Reason, Message string }
				Terminated *struct {
					Reason   string
					ExitCode int
				}
			}
		}
	}
}

// ended reports whether the pod has terminated.
func (p jobPod) ended() bool { return p.Status.Phase == "Failed" || p.Status.Phase == "Succeeded" }

// why returns the reason for which the pod does not run.
func (p jobPod) why() string {
	words := []string{"its pod " + p.Metadata.Name + " is " + cmp.Or(p.Status.Phase, "new")}
	add := func(some ...string) {
		for _, w := range some {
			if w != "" {
				words = append(words, w)
			}
		}
	}
	add(p.Status.Reason, p.Status.Message)
	for _, s := range p.Status.ContainerStatuses {
		if w := s.State.Waiting; w != nil {
			add(w.Reason, w.Message)
		}
		if t := s.State.Terminated; t != nil {
			add(fmt.Sprintf("%s, exit code %d", t.Reason, t.ExitCode))
		}
	}
	return strings.Join(words, ": ")
}
