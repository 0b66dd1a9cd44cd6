// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package endpoint

import (
	"strings"
	"testing"

	datapathv1 "github.com/sluice-net/sluice/proto/gen/sluice/datapath/v1"
	workloadv1 "github.com/sluice-net/sluice/proto/gen/sluice/workload/v1"
)

// TestNamesAreContainersOrPods: a name is first compared with whole container IDs, then with pods, then with the
// beginnings of container IDs.
func TestNamesAreContainersOrPods(t *testing.T) {
	endpoint := func(id, ifname, namespace, pod string) *datapathv1.Endpoint {
		e := &datapathv1.Endpoint{Owner: &workloadv1.Owner{ContainerId: id, InterfaceName: ifname}}
		if pod != "" {
			e.Pod = &workloadv1.PodReference{Namespace: namespace, Name: pod}
		}
		return e
	}
	all := []*datapathv1.Endpoint{
		endpoint("0123", "eth0", "shop", "web"), endpoint("shop9", "client", "", ""), endpoint("a", "b", "", ""),
		endpoint("ff", "eth0", "a", "b"), endpoint("two", "eth0", "shop", "two"), endpoint("two", "net1", "shop", "two"),
	}
	for name, want := range map[string]string{
		"0123": "0123/eth0", "01": "0123/eth0", "0123/eth0": "0123/eth0", "shop/web": "0123/eth0",
		"pod:shop/web": "0123/eth0", "shop/client": "shop9/client", "container:a/b": "a/b", "pod:a/b": "ff/eth0",
		"two/net1": "two/net1", "shop/gone": "", "pod:0123": "", "container:shop/web": "", "pod:web": "",
		"a/b":      `"a/b" is a container and a pod: give container:a/b or pod:a/b`,
		"shop/two": `"shop/two" could be two/eth0 or two/net1`, "two": `"two" could be two/eth0 or two/net1`,
		"": "is neither CONTAINER[/INTERFACE] nor the pod NAMESPACE/NAME", "/b": "is neither CONTAINER",
		"a/b/c": "is neither",
		"a/":    "is neither CONTAINER", "pod:": "is not pod:[NAMESPACE/]NAME",
	} {
		e, err := Match(all, name)
		got := ""
		switch {
		case err != nil:
			got = err.Error()
		case e != nil:
			got = e.GetOwner().GetContainerId() + "/" + e.GetOwner().GetInterfaceName()
		}
		if got != want && (err == nil || !strings.Contains(got, want) || want == "") {
			t.Errorf("%q: %q, want %q", name, got, want)
		}
	}
	if !HasPrefix("pod:shop/web") || HasPrefix("container:x=y") || HasPrefix("k8s:app") {
		t.Error("labels and names are confused")
	}
}

// TestLabelValuesAreThoseOfSelectors: selectors of policies cannot match other values.
func TestLabelValuesAreThoseOfSelectors(t *testing.T) {
	for value, want := range map[string]bool{
		"": true, "web": true, "a.b-c_D9": true, "we b": false, "-a": false, "a.": false, "x=y": false,
		strings.Repeat("a", 63): true, strings.Repeat("a", 64): false,
	} {
		if IsLabelValue(value) != want {
			t.Errorf("%q: want %v", value, want)
		}
	}
}
