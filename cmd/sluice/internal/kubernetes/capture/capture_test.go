// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package capture

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/sluice-net/sluice/cmd/sluice/internal/kubernetes/kubectl"
)

func TestOneInterfaceOfThePodIsChosen(t *testing.T) {
	var all []endpoint
	if err := json.Unmarshal([]byte(`[
		{"owner": {"containerId": "a", "interfaceName": "eth0"}, "pod": {"namespace": "shop", "name": "web"}},
		{"owner": {"containerId": "b", "interfaceName": "eth0"}, "pod": {"namespace": "shop", "name": "db"}},
		{"owner": {"containerId": "b", "interfaceName": "net1"}, "pod": {"namespace": "shop", "name": "db"}},
		{"owner": {"containerId": "c", "interfaceName": "eth0"}, "pod": {"namespace": "other", "name": "web"}},
		{"owner": {"containerId": "d", "interfaceName": "eth0"}}]`), &all); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, ifname, want, err string }{
		{"web", "", "a/eth0", ""},
		{"web", "eth0", "a/eth0", ""},
		{"web", "net1", "", "the pod has no net1, but eth0"},
		{"db", "net1", "b/net1", ""},
		{"db", "", "", "several interfaces, --interface names one: eth0, net1"},
		{"gone", "", "", "no endpoint of the pod shop/gone"},
	} {
		got, err := choose(all, "shop", c.name, c.ifname)
		if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%+v: %q, %v", c, got, err)
		}
	}
}

// TestJobHasTwoCapabilitiesAndNothingToWrite, as documented in docs/privileges.md.
func TestJobHasTwoCapabilitiesAndNothingToWrite(t *testing.T) {
	content, err := json.Marshal(jobOf("ns", "x", "node1", kubectl.DaemonSet{
		Image: "i", PullPolicy: "Never", PullSecrets: []string{"registry"},
	}))
	if err != nil {
		t.Fatal(err)
	}
	var job struct {
		Spec struct {
			TTLSecondsAfterFinished, BackoffLimit *int
			Template                              struct {
				Metadata struct{ Labels map[string]string }
				Spec     struct {
					NodeName                      string
					HostPID, HostIPC, HostNetwork bool
					AutomountServiceAccountToken  *bool
					ImagePullSecrets              []struct{ Name string }
					Containers                    []struct {
						Image, ImagePullPolicy string
						SecurityContext        struct {
							Privileged, ReadOnlyRootFilesystem bool
							AllowPrivilegeEscalation           *bool
							Capabilities                       struct{ Add, Drop []string }
						}
						Resources    struct{ Limits map[string]string }
						VolumeMounts []struct{ ReadOnly bool }
					}
				}
			}
		}
	}
	if err := json.Unmarshal(content, &job); err != nil {
		t.Fatal(err)
	}
	pod := job.Spec.Template.Spec
	if job.Spec.TTLSecondsAfterFinished == nil || job.Spec.BackoffLimit == nil || *job.Spec.BackoffLimit != 0 {
		t.Errorf("the Job stays, or tries again: %s", content)
	}
	// The cluster commands would mistake a pod with this label for a pod of the DaemonSet.
	if "app.kubernetes.io/name="+job.Spec.Template.Metadata.Labels["app.kubernetes.io/name"] == kubectl.Selector {
		t.Error("its pod would be taken for Sluice's on the node")
	}
	if pod.HostPID || pod.HostIPC || !pod.HostNetwork || pod.NodeName != "node1" || len(pod.ImagePullSecrets) != 1 ||
		pod.AutomountServiceAccountToken == nil || *pod.AutomountServiceAccountToken || len(pod.Containers) != 1 {
		t.Fatalf("pod %s", content)
	}
	c := pod.Containers[0]
	s := c.SecurityContext
	if s.Privileged || !s.ReadOnlyRootFilesystem || s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation ||
		strings.Join(s.Capabilities.Add, " ") != "NET_RAW SYS_ADMIN" || strings.Join(s.Capabilities.Drop, " ") != "ALL" ||
		c.Resources.Limits["memory"] == "" || c.Image != "i" || c.ImagePullPolicy != "Never" {
		t.Errorf("container %+v", c)
	}
	for _, m := range c.VolumeMounts {
		if !m.ReadOnly {
			t.Errorf("it may write: %s", content)
		}
	}
}

func TestPodThatDoesNotStartIsExplained(t *testing.T) {
	var p jobPod
	if err := json.Unmarshal([]byte(`{"metadata": {"name": "x"}, "status": {"phase": "Pending", "containerStatuses": [
		{"state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}]}}`), &p); err != nil {
		t.Fatal(err)
	}
	if got := p.why(); got != "its pod x is Pending: ErrImagePull: no such image" {
		t.Errorf("got %q", got)
	}
	p = jobPod{}
	if err := json.Unmarshal([]byte(`{"metadata": {"name": "x"}, "status": {"phase": "Failed", "containerStatuses": [
		{"state": {"terminated": {"reason": "Error", "exitCode": 2}}}]}}`), &p); err != nil {
		t.Fatal(err)
	}
	if got := p.why(); got != "its pod x is Failed: Error, exit code 2" || !p.ended() {
		t.Errorf("got %q, ended %v", got, p.ended())
	}
	if got := (jobPod{}).why(); got != "its pod  is new" {
		t.Errorf("got %q", got)
	}
}
