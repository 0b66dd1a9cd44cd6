// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package policyapi builds the conformance tests of the ClusterNetworkPolicy API as one program. It finds the cluster
// as kubectl does.
package policyapi

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"

	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/config"
	"sigs.k8s.io/network-policy-api/apis/v1beta1"
	"sigs.k8s.io/network-policy-api/conformance"
	"sigs.k8s.io/network-policy-api/conformance/tests"
	"sigs.k8s.io/network-policy-api/conformance/utils/suite"
)

// noSCTP is set by the caller of the program, and used by the suite's own functions, too: see scripts/k8s-policyapi.
var noSCTP = os.Getenv("SLUICE_NO_SCTP") != ""

// servesSCTP is a container of the suite's servers that serves SCTP.
var servesSCTP = regexp.MustCompile(
	` +- name: .*\n +image: .*\n +command: .*porter"]\n +env:\n +- name: SERVE_SCTP_PORT_.*\n +value: .*\n`)

// TestConformance runs all tests, including tests of optional features.
func TestConformance(t *testing.T) {
	rest, err := config.GetConfig()
	if err != nil {
		t.Fatal(err)
	}
	rest.QPS, rest.Burst = 100, 200
	clientset, err := kubernetes.NewForConfig(rest)
	if err != nil {
		t.Fatal(err)
	}
	c, err := client.New(rest, client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := v1beta1.Install(c.Scheme()); err != nil {
		t.Fatal(err)
	}
	// The suite reads manifests from its own files, or from a URL with the default client.
	servers := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write(manifests(t))
	}))
	defer servers.Close()
	http.DefaultClient = servers.Client()
	s := suite.New(suite.Options{
		Client: c, ClientSet: clientset, KubeConfig: *rest, BaseManifests: servers.URL,
		CleanupBaseResources: true, EnableAllSupportedFeatures: true,
	})
	s.Setup(t)
	var all []suite.ConformanceTest
	for _, test := range tests.ConformanceTests {
		if !noSCTP || !strings.Contains(test.ShortName, "SCTP") {
			all = append(all, test)
			continue
		}
		t.Run(test.ShortName, func(t *testing.T) { t.Skip("it tests only SCTP, for which the kernel has no sockets") })
	}
	s.Run(t, all)
}

// manifests returns the manifests of the suite's servers. On a kernel without SCTP sockets it leaves out the SCTP
// servers, whose pods would never become ready.
func manifests(t *testing.T) []byte {
	content, err := conformance.Manifests.ReadFile("base/manifests.yaml")
	if err != nil {
		t.Error(err)
	}
	if !noSCTP {
		return content
	}
	content = servesSCTP.ReplaceAll(content, nil)
	if bytes.Contains(content, []byte("SCTP")) || !bytes.Contains(content, []byte("serve-hostname")) {
		t.Errorf("the suite's servers differ from the expected ones:\n%s", content)
	}
	return content
}
