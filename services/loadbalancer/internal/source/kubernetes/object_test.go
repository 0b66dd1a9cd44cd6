// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kubernetes

import (
	"encoding/json"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-net/sluice/services/loadbalancer/internal/manifest"
	"github.com/sluice-net/sluice/services/loadbalancer/internal/service"
)

// some are texts by the name of their field; other fields get arbitrary texts.
var some = map[string][]string{
	"Name": {"a", "web", "b-1"}, "Namespace": {"shop", "default"},
	"Type":     {"ClusterIP", "NodePort", "LoadBalancer", "Wrong"},
	"Protocol": {"TCP", "UDP", "SCTP", ""}, "ClusterIP": {""}, "ClusterIPs": {"10.0.0.1", "fd00::1", "None"},
	"ExternalIPs": {"192.0.2.1", "192.0.2.2", "2001:db8::1", "x"}, "SessionAffinity": {"", "None", "ClientIP"},
	"LoadBalancerSourceRanges": {"192.0.2.0/24", "2001:db8::/32"}, "ExternalTrafficPolicy": {"", "Cluster", "Local"},
	"IPFamilies": {"IPv4", "IPv6"}, "IPFamilyPolicy": {"SingleStack", "PreferDualStack"},
	"InternalTrafficPolicy": {"Cluster", "Local"},
	"IP":                    {"", "203.0.113.1", "203.0.113.2"}, "IPMode": {"VIP", "Proxy"},
	"AddressType": {"IPv4", "IPv6", "FQDN"},
	"Addresses":   {"10.1.0.1", "10.1.0.2", "fd01::1"}, "NodeName": {"node-a", "node-b"}, "Zone": {"zone-a"},
}

// fill sets a random value. Most lists have one element.
func fill(r *rand.Rand, v reflect.Value, field string) {
	switch at := v.Addr().Interface().(type) {
	case *metav1.Time:
		if r.IntN(2) == 0 {
			*at = metav1.Time{Time: time.Unix(r.Int64N(1<<31), 0)}
		}
		return
	case *[]metav1.ManagedFieldsEntry:
		return
	}
	switch v.Kind() {
	case reflect.Struct:
		for f, x := range v.Fields() {
			fill(r, x, f.Name)
		}
	case reflect.Pointer:
		if r.IntN(2) == 0 {
			v.Set(reflect.New(v.Type().Elem()))
			fill(r, v.Elem(), field)
		}
	case reflect.Slice:
		n := []int{0, 1, 1, 1, 2}[r.IntN(5)]
		v.Set(reflect.MakeSlice(v.Type(), n, n))
		for i := range n {
			fill(r, v.Index(i), field)
		}
	case reflect.Map:
		if v.Type() == reflect.TypeFor[map[string]string]() && r.IntN(2) == 0 {
			v.Set(reflect.ValueOf(map[string]string{
				"kubernetes.io/service-name":                                         "web",
				[]string{"service.kubernetes.io/service-proxy-name", "x"}[r.IntN(2)]: "z",
				"sluice.io/load-balancing-algorithm":                                 "table",
			}))
		}
	case reflect.String:
		if of := some[field]; len(of) > 0 {
			v.SetString(of[r.IntN(len(of))])
		} else {
			v.SetString("anything")
		}
	case reflect.Bool:
		v.SetBool(r.IntN(2) == 0)
	case reflect.Int32, reflect.Int64:
		most := map[string]int64{"Port": 60_000, "TimeoutSeconds": 80_000, "NodePort": 2, "HealthCheckNodePort": 2}[field]
		v.SetInt(r.Int64N(1 + most))
	}
}

// TestObjectsOfTheAPIAreThoseOfTheirTexts: converting an object of the API gives the same content as decoding its
// text. If the text is rejected, the converted object only lacks parts.
func TestObjectsOfTheAPIAreThoseOfTheirTexts(t *testing.T) {
	const tries = 20_000
	r := rand.New(rand.NewPCG(1, 2))
	understood := make(map[service.Kind]int)
	for i := range tries {
		var text any
		var got manifest.Object
		var err error
		if i%2 == 0 {
			s := &corev1.Service{}
			fill(r, reflect.ValueOf(s).Elem(), "")
			s.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}
			got, err = manifest.OfService(serviceOf(s))
			text = s
		} else {
			s := &discoveryv1.EndpointSlice{}
			fill(r, reflect.ValueOf(s).Elem(), "")
			s.TypeMeta = metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"}
			got, err = manifest.OfSlice(sliceOf(s))
			text = s
		}
		data, fails := json.Marshal(text)
		if fails != nil {
			t.Fatal(fails)
		}
		all, want := manifest.Options{}.Decode(data)
		if err != nil {
			t.Fatalf("%s\nis refused: %v", data, err)
		}
		if want != nil {
			if len(got.Notes) == 0 {
				t.Fatalf("%s\nhas no note of %v", data, want)
			}
			continue
		}
		understood[got.Key.Kind]++
		x := all[0]
		same := got.Key == x.Key && slices.Equal(got.Notes, x.Notes)
		if got.Service != nil {
			same = same && x.Service != nil && got.Service.Equal(x.Service)
		} else {
			same = same && x.Slice != nil && got.Slice.Equal(x.Slice)
		}
		if !same {
			t.Fatalf("%s\ngot  %+v\nwant %+v", data, got, x)
		}
	}
	if understood[service.KindService] < tries/100 || understood[service.KindSlice] < tries/100 {
		t.Errorf("of %d objects only %v were right", tries, understood)
	}
}
